"""The event log: collects what happens to the prefix cache between two batches.

Exists once there is a subscriber. Runs of consecutive blocks become one event.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanocore.kv_cache.block_key import TOKEN_BYTES, BlockKey
from nanocore.kv_cache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
    KVEventSubscriber,
)


class EventLog:
    """Events in the order they happen.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self.subscribers: list[KVEventSubscriber] = []
        self._block_size = block_size
        self._events: list[KVEvent] = []
        self._sequence = 0

    def stored(self, parent: BlockKey | None, keys: Sequence[BlockKey]) -> None:
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
            )
        )

    def removed(self, keys: Sequence[BlockKey]) -> None:
        """Note that these contents cannot be found any more."""
        # By digest: that is all that subscribers know of a block.
        self._events.append(BlockRemoved([digest for digest, _ in keys]))

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
