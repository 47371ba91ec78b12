"""The prefix index: finds the block that holds given tokens after a given prefix.

It is indexed by the digest of the block's key. The digest is not cryptographic, so every hit is
confirmed by comparing the tokens and the parent. The parent is compared by identity: blocks of
equal prefixes share one key object, so by induction the whole prefix is compared. A digest
collision can cost a hit, but it can never serve another prompt's KV.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nanocore.kv_cache.block_key import BlockKey
from nanocore.kv_cache.block_pool import Block
from nanocore.kv_cache.events import GroupEvents


class PrefixIndex:
    """One findable block per digest.

    Several blocks may have the same content, because block ids in running block tables must not
    change; only one of the copies is in the index.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, Block] = {}

    def find_prefix(self, keys: Iterable[BlockKey]) -> list[Block]:
        """Return the blocks that hold this prefix, up to the first that is missing."""
        hits: list[Block] = []
        parent: BlockKey | None = None
        find = self._blocks.get
        for digest, content in keys:
            block = find(digest)
            # A parent that was evicted and computed again has another key object: no hit.
            if block is None or block.parent is not parent:
                break
            parent = block.key
            assert parent is not None
            if parent[1] != content:
                break
            hits.append(block)
        return hits

    def get(self, key: BlockKey) -> Block | None:
        """Return the block with this key's digest, whatever its content."""
        return self._blocks.get(key[0])

    def put(
        self, blocks: Sequence[Block], parent: BlockKey | None, keys: Sequence[BlockKey]
    ) -> int:
        """Add consecutive blocks with the content they have, or will have after the planned step.

        Stops at the first digest that is in the index already; returns how many were added.
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
        """Remove blocks whose memory is about to be reused."""
        index = self._blocks
        for block in blocks:
            assert block.key is not None
            del index[block.key[0]]
            block.key = block.parent = None

    def clear(self) -> None:
        self.remove(list(self._blocks.values()))


class GroupIndex:
    """Findable blocks of a group beside the primary, one for each digest.

    A block here bears the very key object of the primary group's block, so a hit is confirmed as
    far back as it is there. events: are told what can be found no longer.
    """

    def __init__(self, events: GroupEvents) -> None:
        self._blocks: dict[bytes, Block] = {}
        self._events = events

    def find(self, key: BlockKey) -> Block | None:
        """Return the block with this content, if it is here."""
        block = self.get(key)
        return block if block is not None and block.key is key else None

    def get(self, key: BlockKey) -> Block | None:
        """Return the block with this key's digest, whatever its content."""
        return self._blocks.get(key[0])

    def put(self, key: BlockKey, block: Block) -> None:
        """Make a block findable, in place of one with the same digest."""
        if (other := self.get(key)) is not None:
            other.key = None
        self._blocks[key[0]], block.key = block, key

    def forget(self, blocks: Sequence[Block]) -> None:
        """Remove cached blocks, and tell that they can be found no longer."""
        keys = [block.key for block in blocks if block.key is not None]
        assert len(keys) == len(blocks)
        self._events.removed(keys)
        self._remove(blocks)

    def clear(self) -> None:
        """Remove all blocks; nobody is told of each."""
        self._remove(list(self._blocks.values()))

    def _remove(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            assert block.key is not None
            del self._blocks[block.key[0]]
            block.key = None
