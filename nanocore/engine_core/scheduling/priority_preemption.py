"""Priority preemption: running requests of lower priority are preempted for a waiting one.

Without it, a request of the highest priority waits until somebody finishes. It takes the rows and
blocks of the lowest running requests, as many as it needs, and none if all of them would not
suffice. Its prompt is then computed before the rest of theirs. Only priority preempts, never age.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from nanocore.engine_core.policy.order import Precedence
from nanocore.engine_core.policy.waiting_queue import RequestHeap
from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.scheduling.running_set import RunningSet
from nanocore.kv_cache import KVCacheManager


class Need(msgspec.Struct, frozen=True):
    """What a waiting request needs now. num_blocks: free ones, with those that must stay free."""

    has_row: bool
    num_blocks: int


class PriorityPreemption:
    """Chooses whom to preempt for a waiting request. Used under the priority policy only.

    Args:
        running, kv_cache: the scheduler's.
        num_groups: groups of rows; a request is preempted only for one of its group.
    """

    def __init__(self, running: RunningSet, kv_cache: KVCacheManager, num_groups: int) -> None:
        def last_first(request: Request) -> Precedence:
            first, arrival, handle = running.precedence(request)
            return -first, -arrival, -handle

        self._running = running
        self._kv_cache = kv_cache
        self._running_heaps = [RequestHeap(last_first) for _ in range(num_groups)]

    def admitted(self, request: Request) -> None:
        self._running_heaps[request.row % len(self._running_heaps)].push(request)

    def removed(self, request: Request) -> None:
        """Forget a request that ended or was preempted; its row may be gone already."""
        for heap in self._running_heaps:
            if request in heap:
                heap.remove(request)

    def may_preempt_for(self, head: Request, group: int) -> bool:
        """Whether the group runs a request that may be preempted for this one. Costs O(1)."""
        last = self._running_heaps[group].head()
        return last is not None and self._may_preempt(last, head)

    def preempt_for(self, head: Request, group: int, need: Callable[[], Need]) -> list[Request]:
        """Preempt requests of the group, the lowest first, until `head` can be admitted.

        need: returns the current need. Blocks that steps in flight will release count as free,
        because waiting a step for them is cheaper than recomputing a request.
        """
        if self._is_met(need()):
            return []
        finishing = set(self._running.table.finishing)
        candidates = [one for one in self._running_heaps[group] if self._may_preempt(one, head)]
        if any(one.row in finishing for one in candidates):
            return []  # its row and blocks are free in a step
        # All or nothing: preempting some without admitting the head would only waste work.
        num_held = sum(len(self._kv_cache.block_ids(one.handle)) for one in candidates)
        if need().num_blocks > self._num_free + num_held:
            return []
        preempted = []
        for one in candidates:
            self.removed(one)
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

    def _may_preempt(self, running: Request, waiting: Request) -> bool:
        # A lower priority whose age has made up for the difference stays.
        is_lower, precedence = running.priority > waiting.priority, self._running.precedence
        return is_lower and precedence(running) > precedence(waiting)
