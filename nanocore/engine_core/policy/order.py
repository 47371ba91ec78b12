"""The order of requests: who is admitted first, and who is preempted first.

fcfs orders by arrival, priority by (priority, arrival); the handle, which only grows, decides among
equals. A preempted request keeps its precedence, so it keeps its place.

With ageing, waiting for `aging_s` seconds is worth one level of priority. All requests age at the
same pace, so the order of two requests never changes, and the key is fixed at arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

from nanocore.engine_core.parameters import SchedulingPolicy
from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.scheduling.row_table import RowTable
from nanocore.kv_cache import Block, BlockKey, KVCacheManager

Precedence: TypeAlias = tuple[float, int, int]
"""Smaller is admitted earlier, larger is preempted earlier."""
PrecedenceKey: TypeAlias = Callable[[Request], Precedence]


def precedence_key(policy: SchedulingPolicy, aging_s: float) -> PrecedenceKey:
    """Return a policy's sort key. aging_s: seconds worth a level of priority; 0: no ageing."""
    if policy == "fcfs":
        return lambda request: (0, request.arrival, request.handle)
    if not aging_s:
        return lambda request: (request.priority, request.arrival, request.handle)
    return lambda request: (
        request.priority + request.arrival_s / aging_s,
        request.arrival,
        request.handle,
    )


def next_preempted(table: RowTable, precedence: PrecedenceKey) -> Request:
    """Return the running request to preempt: the last by precedence, of equals the cheapest.

    Its cost is the tokens it computed itself; those it found in the prefix cache it will probably
    find again. The most expensive of equals stays, so the engine always makes progress. Requests
    that only wait for their last token are left alone: they release their blocks by themselves.
    """

    def order(request: Request) -> tuple[float, int, int, int]:
        first, arrival, handle = precedence(request)
        num_computed, num_cached = table.num_computed[request.row], table.num_cached[request.row]
        return first, arrival, int(num_cached - num_computed), handle

    return max((one for one in table.running() if one.row not in table.finishing), key=order)


class BlockShortage(NamedTuple):
    """State of the pool when a request did not fit: as long as it persists, trying is futile.

    num_gains: see `BlockPool`. missing: key of the first block of its prefix that was not cached.
    """

    handle: int
    num_free_blocks: int
    num_gains: int
    missing: BlockKey | None

    @classmethod
    def of(cls, kv_cache: KVCacheManager, request: Request, hits: Sequence[Block]) -> BlockShortage:
        """Record the current state. hits: cached blocks of the request's prefix."""
        keys = request.prefix_keys(kv_cache.block_size)
        missing = keys[len(hits)] if len(hits) < len(keys) else None
        return cls(request.handle, kv_cache.num_free_blocks, kv_cache.pool.num_gains, missing)

    def persists(self, kv_cache: KVCacheManager, request: Request) -> bool:
        """Whether no block was freed since, and no more of the prefix became cached."""
        return (
            request.handle == self.handle
            and kv_cache.pool.num_gains == self.num_gains
            and not (self.missing and kv_cache.is_findable(self.missing))
        )


NO_SHORTAGE: Final = BlockShortage(-1, -1, -1, None)
"""Matches no request: no handle is negative."""
