"""What tests look at and the engine does not ask for: blocks that are free or fenced."""

from __future__ import annotations

from nanocore.kv_cache import BlockPool, KVCacheManager


def free_ids(pool: BlockPool) -> list[int]:
    """Return the ids of the free blocks in the order in which they will be taken."""
    ids, block = [], pool._ends.next
    while block is not pool._ends:
        ids.append(block.block_id)
        block = block.next
    return ids


def num_fenced_blocks(kv_cache: KVCacheManager) -> int:
    """References to fenced blocks: a shared block counts once for each."""
    return sum(kv_cache._num_fenced(pool) for pool in kv_cache.pools)
