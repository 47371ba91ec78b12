"""Priorities that mean it: who runs gives way to one of higher priority that waits.

Without this a request of the highest priority waits until somebody ends. It takes the row and the
blocks of those that go last, as many as it needs and none if all of them were not enough, and its
prompt is computed before the rest of theirs. Only priority makes anybody give way, never age.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nanocore.engine_core.scheduling.precedence import Precedence, PrecedenceKey
from nanocore.engine_core.scheduling.request import Request
from nanocore.engine_core.scheduling.request_heap import RequestHeap
from nanocore.engine_core.scheduling.running_set import RunningSet
from nanocore.kv_cache import KVCacheManager


@dataclass(frozen=True, slots=True)
class Need:
    """What a waiting request lacks to be admitted. has_row: whether there is one for it.

    num_blocks: free ones that it takes, and that admission leaves.
    """

    has_row: bool
    num_blocks: int


class Urgency:
    """Knows who of the running goes last. Belongs to the scheduler, under the priority policy.

    Args:
        running, kv_cache: the scheduler's. precedence: sort key of requests. num_groups: of rows.
    """

    def __init__(
        self,
        running: RunningSet,
        kv_cache: KVCacheManager,
        precedence: PrecedenceKey,
        num_groups: int,
    ) -> None:
        def last_first(request: Request) -> Precedence:
            first, arrival, handle = precedence(request)
            return -first, -arrival, -handle

        self._running = running
        self._kv_cache = kv_cache
        self._precedence = precedence
        self._last = [RequestHeap(last_first) for _ in range(num_groups)]

    def admitted(self, request: Request) -> None:
        """It has a row from here on."""
        self._last[request.row % len(self._last)].push(request)

    def left(self, request: Request) -> None:
        """It had one."""
        for heap in self._last:
            if request in heap:
                heap.remove(request)

    def is_asked(self, head: Request, group: int) -> bool:
        """Whether the group has a request that goes after this one, which waits."""
        last = self._last[group].head()
        return last is not None and self._gives_way(last, head)

    def make_way(self, head: Request, group: int, need: Callable[[], Need]) -> list[Request]:
        """Preempt requests of the group, the last first, until one that waits has what it needs.

        need: of now. Blocks that steps in flight will release count as free: it waits for them.
        """
        if self._is_met(need()):
            return []
        finishing = set(self._running.table.finishing)
        candidates = [one for one in self._last[group] if self._gives_way(one, head)]
        if any(one.row in finishing for one in candidates):
            return []  # what it holds is free in a step
        num_held = sum(len(self._kv_cache.block_ids(one.handle)) for one in candidates)
        if need().num_blocks > self._num_free + num_held:
            return []
        preempted = []
        for one in candidates:
            self.left(one)
            self._running.preempt(one)
            preempted.append(one)
            if self._is_met(need()):
                break
        return preempted

    @property
    def _num_free(self) -> int:
        return self._kv_cache.num_free_blocks + self._kv_cache.num_fenced_blocks

    def _is_met(self, need: Need) -> bool:
        return need.has_row and need.num_blocks <= self._num_free

    def _gives_way(self, runs: Request, waits: Request) -> bool:
        """A lower priority that age has made up for stays."""
        is_lower = runs.priority > waits.priority
        return is_lower and self._precedence(runs) > self._precedence(waits)
