"""KV cache events: what a prefix-aware router needs to know which prefixes an engine holds.

Set semantics by block hash: a hash is stored once, when its first copy appears, and removed once,
when its last copy goes, so replaying the batches in order gives exactly the findable blocks. With
several groups of layers this is so in each: a prefix is found where the group that keeps all tokens
has all of its blocks, and the others have the last ones.
Batches are numbered from 0 without gaps; a subscriber that sees a gap has missed something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from nanocore.kv_cache.block_key import TOKEN_BYTES, BlockKey


class BlockStored(NamedTuple):
    """Consecutive full blocks of one prefix have become findable.

    block_hashes: 16 bytes each (xxh3-128 over the parent's hash and the content).
    parent_block_hash: of the block before the first of these; None at the start of a prompt.
    token_ids: int32 column of all tokens of these blocks. extra_keys: the tagged extra keys of the
    prompt (cache_salt and the like) if the first of these blocks starts it, else empty; they are
    part of the hashes. group: number of the layers' group; None if there is only one.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: bytes
    block_size: int
    extra_keys: bytes = b""
    group: int | None = None


class BlockRemoved(NamedTuple):
    """No copy of these blocks can be found any more. group: as in `BlockStored`."""

    block_hashes: list[bytes]
    group: int | None = None


class AllBlocksCleared(NamedTuple):
    """The prefix cache was reset."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(NamedTuple):
    """The events of one step, in order. sequence: 0, 1, 2, …"""

    sequence: int
    events: list[KVEvent]


KVEventSubscriber = Callable[[KVEventBatch], None]
"""Called on the step loop's thread, at most once per step; must return at once."""


class EventLog:
    """Events in the order they happen, between two batches. Exists once there is a subscriber.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self.subscribers: list[KVEventSubscriber] = []
        self._block_size = block_size
        self._events: list[KVEvent] = []
        self._sequence = 0

    def stored(
        self, parent: BlockKey | None, keys: Sequence[BlockKey], group: int | None = None
    ) -> None:
        """Note that consecutive blocks after this parent have become findable."""
        content = keys[0][1]
        split = len(content) - self._block_size * TOKEN_BYTES  # extra keys precede the tokens
        tokens = [content[split:], *(content for _, content in keys[1:])]
        self._events.append(
            BlockStored(
                block_hashes=[digest for digest, _ in keys],
                parent_block_hash=parent[0] if parent else None,
                token_ids=b"".join(tokens),
                block_size=self._block_size,
                extra_keys=content[:split],
                group=group,
            )
        )

    def removed(self, keys: Sequence[BlockKey], group: int | None = None) -> None:
        """Note that these contents cannot be found any more."""
        # By digest: that is all that subscribers know of a block.
        self._events.append(BlockRemoved([digest for digest, _ in keys], group))

    def cleared(self) -> None:
        """Note that nothing can be found any more; what was noted before stands."""
        self._events.append(AllBlocksCleared())

    def publish(self) -> None:
        """Hand a numbered batch to every subscriber, unless nothing has happened."""
        if not self._events:
            return
        batch = KVEventBatch(self._sequence, self._events)
        self._sequence += 1
        self._events = []
        for subscriber in self.subscribers:
            subscriber(batch)


class GroupEvents:
    """One group's changes, for the log if there is one. number: of the group; None if it is alone.

    log: set once there is a subscriber.
    """

    def __init__(self, number: int | None) -> None:
        self.log: EventLog | None = None
        self._number = number

    def stored(self, parent: BlockKey | None, keys: Sequence[BlockKey]) -> None:
        if self.log is not None:
            self.log.stored(parent, keys, self._number)

    def removed(self, keys: Sequence[BlockKey]) -> None:
        if self.log is not None and keys:
            self.log.removed(keys, self._number)
