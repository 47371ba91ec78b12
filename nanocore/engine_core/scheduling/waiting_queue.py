"""The waiting queue: who is admitted next, under either policy.

fcfs orders by arrival, priority by (priority, arrival); the handle, which grows, decides among
equals. A preempted request comes back under its old precedence, so it keeps its place.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from nanocore.engine_core.parameters import SchedulingPolicy
from nanocore.engine_core.scheduling.request import Request

Precedence = tuple[int, int, int]
_MIN_STALE_ENTRIES = 64


class WaitingQueue:
    """A heap of requests by precedence; the smallest goes first.

    Args:
        policy: what precedence is made of.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._by_priority = policy == "priority"
        self._heap: list[tuple[Precedence, int]] = []
        self._requests: dict[int, Request] = {}  # what the heap has beyond these was removed

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request.handle in self._requests

    def __iter__(self) -> Iterator[Request]:
        """The requests in the order in which they would be admitted. For tests and reports."""
        return iter(sorted(self._requests.values(), key=self.precedence))

    def precedence(self, request: Request) -> Precedence:
        """Sort key: smaller is admitted earlier, larger is preempted earlier."""
        priority = request.priority if self._by_priority else 0
        return priority, request.arrival, request.handle

    def push(self, request: Request) -> None:
        """Queue a request, in its place."""
        heapq.heappush(self._heap, (self.precedence(request), request.handle))
        self._requests[request.handle] = request

    def head(self) -> Request | None:
        """The request that goes first."""
        while self._heap:
            request = self._requests.get(self._heap[0][1])
            if request is not None:
                return request
            heapq.heappop(self._heap)
        return None

    def remove(self, request: Request) -> None:
        """Take out a request, the head or any other."""
        del self._requests[request.handle]
        if self._heap[0][1] == request.handle:
            heapq.heappop(self._heap)
        elif len(self._heap) > _MIN_STALE_ENTRIES + 2 * len(self._requests):
            self._heap = [entry for entry in self._heap if entry[1] in self._requests]
            heapq.heapify(self._heap)
