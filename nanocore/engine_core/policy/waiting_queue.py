"""The waiting queue: requests without a row, ordered by priority, then fairly by session.

    WaitingQueue → SessionQueues (one per priority) → RequestHeap (one per session)

The request with the smallest precedence decides which priority is served. Within a priority,
sessions are served by deficit round robin, so one session with many requests cannot hold up
another. With ageing, an old request may bring its priority to the front; which of that priority's
sessions goes then is still decided by deficit round robin.

Only the head of the queue is admitted; no other request passes it. Requests that are not ready are
not here: see `requests/readiness.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final, TypeAlias

import msgspec

from nanocore.engine_core.policy.order import MIN_STALE_ENTRIES, PrecedenceKey, RequestHeap
from nanocore.engine_core.requests.request import Request

QUANTUM_TOKENS: Final = 512

Turn: TypeAlias = tuple[int, int]
"""(round, place in line) of a session; the smaller one is served first. A session's only grows."""


class _Account(msgspec.Struct):
    """One session's share. num_tokens: charged, below one quantum."""

    turn: Turn
    num_tokens: int = 0
    num_waiting: int = 0


class DeficitRoundRobin:
    """Turns of sessions by deficit round robin (Shreedhar & Varghese 1996), charged afterwards.

    One request of the session whose turn it is gets admitted, whatever it costs. Then the session
    is charged the uncached prompt tokens of that request, at least one quantum, and its next turn
    is as many rounds later as that cost quanta. A turn therefore does not depend on what will be
    admitted, and empty rounds cost nothing. The minimum of one quantum counts the row: small
    requests alternate one by one.

    Bound: between two admissions of a session that has requests waiting, every other session is
    admitted at most what that session was, plus one quantum and one largest request. A new session
    waits for at most one request of each other one.
    """

    def __init__(self, quantum_tokens: int = QUANTUM_TOKENS) -> None:
        self._quantum_tokens = quantum_tokens
        self._round = 0
        self._num_places = 0
        self._accounts: dict[int, _Account] = {}
        self._num_kept = 0  # by the last sweep; the next one comes when there are twice as many

    def __len__(self) -> int:
        """Accounts, including those of absent sessions that were not swept out."""
        return len(self._accounts)

    def of(self, client: int) -> Turn:
        """Return the turn of a session that has a request waiting."""
        return self._accounts[client].turn

    def enter(self, client: int) -> None:
        """Count one more waiting request. A new session is last in the current round."""
        account = self._accounts.get(client)
        if account is None or self._is_over(account):
            if len(self._accounts) > MIN_STALE_ENTRIES + 2 * self._num_kept:
                self._sweep()
            account = self._accounts[client] = _Account((self._round, self._next_place()))
        account.num_waiting += 1

    def leave(self, client: int) -> None:
        """Count one less. A session that is in debt keeps it though it has no request."""
        self._accounts[client].num_waiting -= 1

    def advance_to(self, turn: Turn) -> None:
        """Make this the current turn; sessions that enter from now on come after it."""
        self._round = max(self._round, turn[0])

    def charge(self, client: int, num_tokens: int) -> None:
        """Charge a session for an admitted request with this many uncached tokens."""
        account = self._accounts[client]
        account.num_tokens += max(num_tokens, self._quantum_tokens)
        num_rounds, account.num_tokens = divmod(account.num_tokens, self._quantum_tokens)
        now = max(self._round, account.turn[0])
        account.turn = now + num_rounds, self._next_place()

    def _is_over(self, account: _Account) -> bool:
        """Whether a session has no request, and the round in which its debt is paid has come."""
        return not account.num_waiting and account.turn[0] <= self._round

    def _sweep(self) -> None:
        accounts = self._accounts.items()
        self._accounts = {client: one for client, one in accounts if not self._is_over(one)}
        self._num_kept = len(self._accounts)

    def _next_place(self) -> int:
        self._num_places += 1
        return self._num_places


class SessionQueues:
    """One priority's waiting requests by session; preempted requests go before all others.

    Preempted requests have had their session's turn already, so they are not charged again.

    precedence: sort key within a session.
    """

    def __init__(self, precedence: PrecedenceKey, quantum_tokens: int = QUANTUM_TOKENS) -> None:
        self._precedence = precedence
        self._fairness = DeficitRoundRobin(quantum_tokens)
        self._preempted = RequestHeap(precedence)
        self._heaps: dict[int, RequestHeap] = {}  # by client; none is empty
        # A session's turn grows while it is listed here, so an entry may be too early, never too
        # late: `head` corrects the entry at the top before it believes it.
        self._order: list[tuple[Turn, int]] = []  # heap of (turn, client)
        self._listed: set[int] = set()  # clients with an entry in `_order`

    def __bool__(self) -> bool:
        return bool(self._preempted) or bool(self._heaps)

    def push(self, request: Request) -> None:
        if request.was_admitted:
            self._preempted.push(request)
            return
        client = request.client
        self._fairness.enter(client)
        heap = self._heaps.get(client)
        if heap is None:
            heap = self._heaps[client] = RequestHeap(self._precedence)
            if client not in self._listed:
                self._listed.add(client)
                heapq.heappush(self._order, (self._fairness.of(client), client))
        heap.push(request)

    def remove(self, request: Request) -> None:
        if request.was_admitted:
            self._preempted.remove(request)
            return
        client = request.client
        heap = self._heaps[client]
        heap.remove(request)
        if not heap:
            del self._heaps[client]
            if len(self._order) > MIN_STALE_ENTRIES + 2 * len(self._heaps):
                self._rebuild_order()
        self._fairness.leave(client)

    def admit(self, request: Request, num_tokens: int) -> None:
        """Take out a request that gets a row and has this many uncached tokens."""
        if not request.was_admitted:
            self._fairness.charge(request.client, num_tokens)
        self.remove(request)

    def head(self, advances: bool = True) -> Request | None:
        """Return the request to serve first. advances: make its turn the current one.

        The result stays the same until a request is taken out or preempted.
        """
        preempted = self._preempted.head()
        if preempted is not None:
            return preempted
        while self._order:
            turn, client = self._order[0]
            heap = self._heaps.get(client)
            if heap is None:
                heapq.heappop(self._order)
                self._listed.remove(client)
            elif (now := self._fairness.of(client)) != turn:
                heapq.heapreplace(self._order, (now, client))
            else:
                if advances:
                    self._fairness.advance_to(turn)
                return heap.head()
        return None

    def _rebuild_order(self) -> None:
        self._order = [(self._fairness.of(client), client) for client in self._heaps]
        heapq.heapify(self._order)
        self._listed = set(self._heaps)


class WaitingQueue:
    """The requests that wait for a row and for nothing else.

    Args:
        precedence: sort key of requests.
        has_priorities: whether priorities are heeded; else all requests are on one level.
    """

    def __init__(
        self,
        precedence: PrecedenceKey,
        has_priorities: bool = False,
        quantum_tokens: int = QUANTUM_TOKENS,
    ) -> None:
        self._precedence = precedence
        self._has_priorities = has_priorities
        self._quantum_tokens = quantum_tokens
        self._requests = RequestHeap(precedence)
        self._levels: dict[int, SessionQueues] = {}  # by priority; none is empty
        # The head is asked for several times a step, so it is kept until the next change.
        self._head: Request | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def __iter__(self) -> Iterator[Request]:
        """Iterate by precedence."""
        return iter(self._requests)

    def push(self, request: Request) -> None:
        self._head = None
        self._requests.push(request)
        key = self._level_key(request)
        if key not in self._levels:
            self._levels[key] = SessionQueues(self._precedence, self._quantum_tokens)
        self._levels[key].push(request)

    def head(self) -> Request | None:
        """Return the request to admit next."""
        if self._head is None:
            self._head = self._find_head()
        return self._head

    def peek(self) -> Request | None:
        """Return the head without advancing its session's turn: for reports."""
        return self._find_head(advances=False)

    def remove(self, request: Request) -> None:
        self._levels[self._level_key(request)].remove(request)
        self._drop(request)

    def admit(self, request: Request, num_tokens: int) -> None:
        """Take out a request that gets a row; its session is charged num_tokens."""
        self._levels[self._level_key(request)].admit(request, num_tokens)
        self._drop(request)

    def _find_head(self, advances: bool = True) -> Request | None:
        first = self._requests.head()
        return first and self._levels[self._level_key(first)].head(advances)

    def _level_key(self, request: Request) -> int:
        return request.priority if self._has_priorities else 0

    def _drop(self, request: Request) -> None:
        """Forget a request that its level does not hold any more."""
        self._head = None
        self._requests.remove(request)
        key = self._level_key(request)
        if not self._levels[key]:
            del self._levels[key]
