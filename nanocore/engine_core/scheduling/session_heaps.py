"""Waiting requests by session: each session's in their order, the sessions by turns.

Those that were preempted go before all others, in their order: they have had their turn. What was
removed leaves entries that are dropped when they come up, or swept out when they are too many.
"""

from __future__ import annotations

import heapq
from typing import Final, TypeAlias

from nanocore.engine_core.scheduling.precedence import Precedence, PrecedenceKey
from nanocore.engine_core.scheduling.request import Request
from nanocore.engine_core.scheduling.request_heap import RequestHeap
from nanocore.engine_core.scheduling.turns import Turn, Turns

_MIN_STALE_ENTRIES: Final = 64
_BEFORE_ALL: Final = -1, 0

Candidate: TypeAlias = tuple[Turn, Precedence, Request]
"""The smallest goes first; no two have the same precedence."""


class SessionHeaps:
    """precedence: sort key inside a session. turns: the sessions', who may wait elsewhere, too."""

    def __init__(self, precedence: PrecedenceKey, turns: Turns) -> None:
        self._precedence = precedence
        self._turns = turns
        self._preempted = RequestHeap(precedence)
        self._heaps: dict[int, RequestHeap] = {}  # by client; none is empty
        self._order: list[tuple[Turn, int]] = []  # (turn, client): as it was, or as it is
        self._listed: set[int] = set()  # clients with an entry in it

    def push(self, request: Request) -> None:
        """Add a request, in its place."""
        if _was_running(request):
            self._preempted.push(request)
            return
        client = request.client
        self._turns.enter(client)
        heap = self._heaps.get(client)
        if heap is None:
            heap = self._heaps[client] = RequestHeap(self._precedence)
            if client not in self._listed:
                self._listed.add(client)
                heapq.heappush(self._order, (self._turns.of(client), client))
        heap.push(request)

    def remove(self, request: Request) -> None:
        """Take out a request, the head or any other."""
        if _was_running(request):
            self._preempted.remove(request)
            return
        client = request.client
        heap = self._heaps[client]
        heap.remove(request)
        if not heap:
            del self._heaps[client]
            if len(self._order) > _MIN_STALE_ENTRIES + 2 * len(self._heaps):
                self._sweep()
        self._turns.leave(client)

    def admit(self, request: Request, num_tokens: int) -> None:
        """Take out a request that gets a row, and so many tokens to compute."""
        if not _was_running(request):
            self._turns.charge(request.client, num_tokens)
        self.remove(request)

    def first(self) -> Candidate | None:
        """Who goes first, if anybody waits."""
        preempted = self._preempted.head()
        if preempted is not None:
            return _BEFORE_ALL, self._precedence(preempted), preempted
        while self._order:
            turn, client = self._order[0]
            heap = self._heaps.get(client)
            if heap is None:
                heapq.heappop(self._order)
                self._listed.remove(client)
            elif (now := self._turns.of(client)) != turn:
                heapq.heapreplace(self._order, (now, client))
            else:
                head = heap.head()
                assert head is not None
                return turn, self._precedence(head), head
        return None

    def _sweep(self) -> None:
        self._order = [(self._turns.of(client), client) for client in self._heaps]
        heapq.heapify(self._order)
        self._listed = set(self._heaps)


def _was_running(request: Request) -> bool:
    return request.num_cached_tokens is not None
