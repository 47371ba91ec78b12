"""The KVCacheManager: which blocks a request holds, and which it can share.

Owned by the scheduler, on the step loop's thread. A failed allocation touches nothing. A request is
known here by its handle, from its first `allocate` to its `free`.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanocore.kv_cache.block_pool import Block, BlockPool
from nanocore.kv_cache.prefix_index import ROOT_ID, BlockKey, PrefixIndex


class KVCacheManager:
    """Allocates fixed-size blocks to requests and finds cached prefixes.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        enable_prefix_caching: whether full blocks are remembered and looked up.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._index = PrefixIndex()
        self._pool = BlockPool(num_blocks, on_evict=self._index.remove)
        self._held: dict[int, list[Block]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks nobody holds; some of them may still be found by their content."""
        return self._pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose content the prefix index knows, held or free."""
        return len(self._index)

    @property
    def usage(self) -> float:
        """Share of the pool that is held, 0 to 1."""
        return 1.0 - self._pool.num_free / self.num_blocks

    def block_ids(self, handle: int) -> list[int]:
        """Ids of the blocks a request holds, in the order of its tokens."""
        return [block.block_id for block in self._held.get(handle, ())]

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, keys: Sequence[BlockKey], num_tokens: int) -> list[Block]:
        """The longest cached prefix of a request, as blocks.

        At most num_tokens - 1 tokens: the last one must be computed to have logits.
        """
        hits: list[Block] = []
        parent_id = ROOT_ID
        for key in keys[: (num_tokens - 1) // self.block_size]:
            block = self._index.find(parent_id, key)
            if block is None:
                break
            hits.append(block)
            parent_id = block.content_id
        return hits

    def can_admit(self, num_tokens: int, hits: Sequence[Block]) -> bool:
        """Whether a request of num_tokens that shares `hits` fits the free blocks as a whole."""
        return self._shortage(self.num_blocks_for(num_tokens), hits) <= 0

    def allocate(
        self, handle: int, num_tokens: int, hits: Sequence[Block] = ()
    ) -> list[int] | None:
        """Let a request hold blocks for its first `num_tokens` tokens.

        hits: for a request that holds nothing yet, the blocks of its cached prefix.
        Returns the ids of the blocks added (hits included), or None if too few are free.
        """
        held = self._held.get(handle, [])
        assert not (held and hits), "a prefix is shared at admission only"
        num_new = self.num_blocks_for(num_tokens) - len(held) - len(hits)
        if self._shortage(num_new + len(hits), hits) > 0:
            return None
        for block in hits:
            self._pool.touch(block)
        added = [*hits, *self._pool.take(max(num_new, 0))]
        self._held.setdefault(handle, held).extend(added)
        return [block.block_id for block in added]

    def register(self, handle: int, keys: Sequence[BlockKey], start: int, end: int) -> None:
        """Make a request's blocks number start to end - 1 findable under their keys.

        Called when a step that fills them is planned: all KV writes of a layer precede its reads,
        so even a request admitted in the same step may share them.
        """
        if not self.enable_prefix_caching:
            return
        held = self._held[handle]
        for i in range(start, end):
            if held[i].key is None:
                parent_id = held[i - 1].content_id if i else ROOT_ID
                self._index.insert(held[i], parent_id, keys[i])

    def free(self, handle: int) -> None:
        """Take back all blocks of a request; their content stays findable until it is evicted."""
        self._pool.release(reversed(self._held.pop(handle, [])))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content. False, and nothing forgotten, while any block is held."""
        if self._pool.num_free < self.num_blocks:
            return False
        for block in self._pool.blocks:
            if block.key is not None:
                self._index.remove(block)
        return True

    def _shortage(self, num_needed: int, hits: Sequence[Block]) -> int:
        """Blocks missing to hold num_needed more, of which `hits` are found.

        A hit that nobody holds is in the free list, so sharing it uses up free capacity, too.
        """
        num_shared = sum(block.ref_count > 0 for block in hits)
        return num_needed - num_shared - self._pool.num_free
