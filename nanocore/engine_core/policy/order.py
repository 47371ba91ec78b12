"""The order of requests: who is admitted first, and who is preempted first.

fcfs orders by arrival, priority by (priority, arrival); the handle, which only grows, decides among
equals. A preempted request keeps its precedence, so it keeps its place.

With ageing, waiting for `aging_s` seconds is worth one level of priority. All requests age at the
same pace, so the order of two requests never changes, and the key is fixed at arrival.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeAlias

from nanocore.engine_core.parameters import SchedulingPolicy
from nanocore.engine_core.requests.request import Request

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


MIN_STALE_ENTRIES: Final = 64
"""Removed entries stay in a heap until they are more than this and twice the live ones."""


class RequestHeap:
    """A heap of requests with removal from any place; the smallest key goes first.

    A request's key does not change while it is in the heap. Removal is lazy: it leaves a stale
    entry, which is dropped when it reaches the top or when stale entries are too many.
    """

    def __init__(self, key: Callable[[Request], Precedence]) -> None:
        self._key = key
        self._heap: list[tuple[Precedence, int]] = []
        self._requests: dict[int, Request] = {}  # entries of the heap beyond these are stale

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request.handle in self._requests

    def __iter__(self) -> Iterator[Request]:
        """Iterate in order. For tests and reports: it sorts."""
        return iter(sorted(self._requests.values(), key=self._key))

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (self._key(request), request.handle))
        self._requests[request.handle] = request

    def head(self) -> Request | None:
        while self._heap:
            request = self._requests.get(self._heap[0][1])
            if request is not None:
                return request
            heapq.heappop(self._heap)
        return None

    def remove(self, request: Request) -> None:
        del self._requests[request.handle]
        if self._heap[0][1] == request.handle:
            heapq.heappop(self._heap)
        elif len(self._heap) > MIN_STALE_ENTRIES + 2 * len(self._requests):
            self._heap = [entry for entry in self._heap if entry[1] in self._requests]
            heapq.heapify(self._heap)


class PriorityVictims:
    """The running requests that may be preempted for a waiting one, under the priority policy.

    Only priority preempts, never age: a lower priority whose age has made up for it stays.
    """

    def __init__(self, precedence: PrecedenceKey) -> None:
        def last_first(request: Request) -> Precedence:
            first, arrival, handle = precedence(request)
            return -first, -arrival, -handle

        self._precedence = precedence
        self._running = RequestHeap(last_first)

    def add(self, request: Request) -> None:
        self._running.push(request)

    def discard(self, request: Request) -> None:
        """Forget a request that ended or was preempted, if it is known."""
        if request in self._running:
            self._running.remove(request)

    def may_preempt_for(self, waiting: Request) -> bool:
        """Whether there is one for this request. Costs O(1)."""
        last = self._running.head()
        return last is not None and self._may_preempt(last, waiting)

    def of(self, waiting: Request) -> list[Request]:
        """Return those that may be preempted for this request, the lowest first."""
        return [one for one in self._running if self._may_preempt(one, waiting)]

    def _may_preempt(self, running: Request, waiting: Request) -> bool:
        is_lower = running.priority > waiting.priority
        return is_lower and self._precedence(running) > self._precedence(waiting)


def last_of(running: Iterable[tuple[Request, int]], precedence: PrecedenceKey) -> Request:
    """Return the request to preempt when blocks run out: the last; of equals the cheapest.

    The most expensive of equals stays, so the engine always makes progress.

    running: requests, and the tokens that each would have to compute again.
    """

    def order(candidate: tuple[Request, int]) -> tuple[float, int, int, int]:
        request, cost = candidate
        first, arrival, handle = precedence(request)
        return first, arrival, -cost, handle

    return max(running, key=order)[0]
