"""Room for waiting requests: rows and blocks.

A request is admitted only if its whole prompt fits, though only its first chunk's blocks are taken
then: two long prompts may fit one by one and not together, and one of them is preempted later.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

from nanocore.engine_core.config import SchedulerConfig
from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.scheduling.running_set import RunningSet
from nanocore.kv_cache import BlockKey, KVCacheManager, Prefix


class BlockShortage(NamedTuple):
    """State of the pools when a request did not fit: as long as it persists, trying is futile.

    num_gains: see `BlockPool`. missing: key of the first block of its prefix that was not cached.
    """

    handle: int
    num_free_blocks: int
    num_gains: int
    missing: BlockKey | None

    @classmethod
    def of(cls, kv_cache: KVCacheManager, request: Request, prefix: Prefix) -> BlockShortage:
        """Record the current state. prefix: the request's, as far as it is cached."""
        keys = request.prefix_keys(kv_cache.block_size)
        num_found = len(prefix.blocks) + prefix.num_lost
        missing = keys[num_found] if num_found < len(keys) else None
        return cls(request.handle, kv_cache.num_free_blocks, kv_cache.num_gains, missing)

    def persists(self, kv_cache: KVCacheManager, request: Request) -> bool:
        """Whether no block was freed since, and no more of the prefix became cached."""
        return (
            request.handle == self.handle
            and kv_cache.num_gains == self.num_gains
            and not (self.missing and kv_cache.is_findable(self.missing))
        )


NO_SHORTAGE: Final = BlockShortage(-1, -1, -1, None)
"""Matches no request: no handle is negative."""


class Room:
    """What the running set and the cache leave for waiting requests."""

    def __init__(
        self, config: SchedulerConfig, kv_cache: KVCacheManager, running: RunningSet
    ) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self._running = running
        self._watermark = int(config.watermark * kv_cache.num_slabs)

    def num_rows(self, group: int, num_requests: int) -> int:
        """Return how many rows a step of this group may give to waiting requests.

        Groups stay equally large. num_requests: running ones and all that may run.
        """
        num_taken, num_free = self._running.row_counts(group)
        # Without a share, one pipeline group would take all requests while the others idle.
        fair_share = -(-num_requests // self._config.num_groups)
        return min(num_free, fair_share - num_taken)

    def find_prefix(self, request: Request, is_cached: bool = True) -> tuple[Prefix, int]:
        """Return the request's cached prefix, and how many of its tokens are to be computed.

        is_cached: False if it may share no block.
        """
        block_size = self._kv_cache.block_size
        num_tokens = request.num_tokens
        keys = request.prefix_keys(block_size) if is_cached else ()
        prefix = self._kv_cache.find_prefix(keys, num_tokens)
        return prefix, num_tokens - len(prefix.blocks) * block_size

    def fits(
        self,
        request: Request,
        prefix: Prefix,
        released: Collection[int] = (),
        with_fenced: bool = False,
    ) -> bool:
        """Whether the whole prompt fits now, beside the watermark that others need to grow.

        released, with_fenced: see `KVCacheManager.can_allocate`.
        """
        handle, num_tokens = request.handle, request.num_tokens
        num_reserved = self._watermark if len(self._running) else 0
        return self._kv_cache.can_allocate(
            handle, num_tokens, prefix, num_reserved, released, with_fenced
        )
