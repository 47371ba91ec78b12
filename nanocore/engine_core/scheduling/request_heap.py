"""A heap of requests from which any may be taken: of those that wait, and of those that run."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Final

from nanocore.engine_core.scheduling.precedence import Precedence
from nanocore.engine_core.scheduling.request import Request

_MIN_STALE_ENTRIES: Final = 64


class RequestHeap:
    """Requests by a key that does not change while they are in it; the smallest goes first."""

    def __init__(self, key: Callable[[Request], Precedence]) -> None:
        self._key = key
        self._heap: list[tuple[Precedence, int]] = []
        self._requests: dict[int, Request] = {}  # what the heap has beyond these was removed

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request.handle in self._requests

    def __iter__(self) -> Iterator[Request]:
        """The requests in their order. For tests and reports."""
        return iter(sorted(self._requests.values(), key=self._key))

    def push(self, request: Request) -> None:
        """Add a request, in its place."""
        heapq.heappush(self._heap, (self._key(request), request.handle))
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
