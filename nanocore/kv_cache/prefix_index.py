"""The prefix index: from the content of a full block, and of all before it, to the block.

The digest of a block's key is only the index: it is not cryptographic, so every hit is confirmed by
comparing the content and the parent. The parent is compared by identity: blocks of equal prefixes
share one key object, so by induction the whole prefix is compared, and a collision can cost a hit
but never serve another prompt's KV.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nanocore.kv_cache.block_key import BlockKey
from nanocore.kv_cache.block_pool import Block


class PrefixIndex:
    """Finds the block that holds a content after a given parent; one block per digest.

    Blocks of the same content may exist more than once, because the ids in running block tables
    must not change; only one of the copies is findable.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, Block] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def find_prefix(self, keys: Iterable[BlockKey]) -> list[Block]:
        """The blocks confirmed to hold this prefix, up to the first that is missing."""
        hits: list[Block] = []
        parent: BlockKey | None = None
        find = self._blocks.get
        for digest, content in keys:
            block = find(digest)
            if block is None or block.parent is not parent:
                break
            parent = block.key
            assert parent is not None
            if parent[1] != content:
                break
            hits.append(block)
        return hits

    def get(self, key: BlockKey) -> Block | None:
        """The block that has this key's digest, of whatever content."""
        return self._blocks.get(key[0])

    def put(
        self, blocks: Sequence[Block], parent: BlockKey | None, keys: Sequence[BlockKey]
    ) -> int:
        """Record what consecutive blocks hold, or will hold at the end of the step being planned.

        Stops at the first block whose digest is in the index already; returns how many were put.
        """
        index = self._blocks
        num_before = len(index)
        for block, key in zip(blocks, keys, strict=True):
            digest = key[0]
            if digest in index:
                break
            index[digest] = block
            block.key = key
            block.parent = parent
            parent = key
        return len(index) - num_before

    def remove(self, blocks: Iterable[Block]) -> None:
        """Forget blocks, because their memory is about to be used for something else."""
        index = self._blocks
        for block in blocks:
            assert block.key is not None
            del index[block.key[0]]
            block.key = block.parent = None

    def clear(self) -> None:
        """Forget all blocks."""
        self.remove(list(self._blocks.values()))
