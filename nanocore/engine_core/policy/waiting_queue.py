"""The waiting queue: requests without a row, ordered by priority, then fairly by session.

    WaitingQueue → PriorityLevel (one per priority) → SessionQueues → RequestHeap (one per session)

The request with the smallest precedence decides which priority is served. Within a priority,
sessions are served by deficit round robin, so one session with many requests cannot hold up
another. With ageing, an old request may bring its priority to the front; which of that priority's
sessions goes then is still decided by deficit round robin.

Only the head of the queue is admitted; no other request passes it. There is one exception: when as
many prompts are computed in chunks as `max_num_partial_prefills` allows, a long prompt at the head
is deferred, and shorter ones are admitted before it. Requests that wait for anything else are not
here: see `requests/readiness.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final, TypeAlias

import msgspec

from nanocore.engine_core.policy.order import (
    MIN_STALE_ENTRIES,
    Precedence,
    PrecedenceKey,
    RequestHeap,
)
from nanocore.engine_core.requests.readiness import PARTIAL_PREFILLS
from nanocore.engine_core.requests.request import Request

QUANTUM_TOKENS: Final = 512
_BEFORE_ALL: Final = -1, 0

Turn: TypeAlias = tuple[int, int]
"""(round, place in line) of a session; the smaller one is served first. A session's only grows."""
Candidate: TypeAlias = tuple[Turn, Precedence, Request]
"""The smallest is served first; no two requests have the same precedence."""


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

    Args:
        precedence: sort key within a session.
        fairness: whose turn it is; shared with the other queues of the same priority.
    """

    def __init__(self, precedence: PrecedenceKey, fairness: DeficitRoundRobin) -> None:
        self._precedence = precedence
        self._fairness = fairness
        self._preempted = RequestHeap(precedence)
        self._heaps: dict[int, RequestHeap] = {}  # by client; none is empty
        # A session's turn grows while it is listed here, so an entry may be too early, never too
        # late: `first` corrects the entry at the top before it believes it.
        self._order: list[tuple[Turn, int]] = []  # heap of (turn, client)
        self._listed: set[int] = set()  # clients with an entry in `_order`

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

    def first(self) -> Candidate | None:
        """Return the request to serve first, if any waits."""
        preempted = self._preempted.head()
        if preempted is not None:
            return _BEFORE_ALL, self._precedence(preempted), preempted
        while self._order:
            turn, client = self._order[0]
            heap = self._heaps.get(client)
            if heap is None:
                heapq.heappop(self._order)
                self._listed.remove(client)
            elif (now := self._fairness.of(client)) != turn:
                heapq.heapreplace(self._order, (now, client))
            else:
                head = heap.head()
                assert head is not None
                return turn, self._precedence(head), head
        return None

    def _rebuild_order(self) -> None:
        self._order = [(self._fairness.of(client), client) for client in self._heaps]
        heapq.heapify(self._order)
        self._listed = set(self._heaps)


class PriorityLevel:
    """The waiting requests of one priority, in two lanes: in line, and deferred.

    Deferred requests are kept apart because they may not always go. A session has one turn for both
    lanes; with requests in both it sends the one that came first.
    """

    def __init__(self, precedence: PrecedenceKey, quantum_tokens: int = QUANTUM_TOKENS) -> None:
        self._fairness = DeficitRoundRobin(quantum_tokens)
        self._lanes = [SessionQueues(precedence, self._fairness) for _ in range(2)]
        self.num_requests = 0

    def lane(self, request: Request) -> SessionQueues:
        """Return the lane that a request of this priority is in, or is to be put in."""
        return self._lanes[PARTIAL_PREFILLS in request.waits_for]

    def head(self, with_deferred: bool, advances: bool = True) -> Request | None:
        """Return the request to serve first. advances: make its turn the current one.

        The result stays the same until a request is taken out, preempted or deferred.
        """
        in_line, deferred = self._lanes
        first = in_line.first()
        later = deferred.first() if with_deferred else None
        if first is None or (later is not None and later < first):
            first = later
        if first is None:
            return None
        turn, _, request = first
        if advances:
            self._fairness.advance_to(turn)
        return request


class WaitingQueue:
    """The requests that wait for a row and for nothing else, or for the partial-prefill limit.

    Args:
        precedence: sort key of requests.
        has_priorities: whether priorities are heeded; else all requests are on one level.

    deferred: prompts that wait for the partial-prefill limit.
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
        self._in_line = RequestHeap(precedence)
        self.deferred = RequestHeap(precedence)
        self._levels: dict[int, PriorityLevel] = {}  # by priority; none is empty
        # The head is asked for several times a step, so it is kept until the next change.
        self._heads: dict[bool, Request | None] = {}  # by with_deferred

    def __len__(self) -> int:
        return len(self._in_line) + len(self.deferred)

    def __contains__(self, request: Request) -> bool:
        return request in self._in_line or request in self.deferred

    def __iter__(self) -> Iterator[Request]:
        """Iterate over requests that are not deferred, by precedence."""
        return iter(self._in_line)

    def push(self, request: Request) -> None:
        self._heads.clear()
        self._in_line.push(request)
        key = self._level_key(request)
        if key not in self._levels:
            self._levels[key] = PriorityLevel(self._precedence, self._quantum_tokens)
        level = self._levels[key]
        level.lane(request).push(request)
        level.num_requests += 1

    def head(self, with_deferred: bool = True) -> Request | None:
        """Return the request to admit next. with_deferred: deferred ones may go, too."""
        if with_deferred not in self._heads:
            self._heads[with_deferred] = self._find_head(with_deferred)
        return self._heads[with_deferred]

    def peek(self) -> Request | None:
        """Return the head without advancing its session's turn: for reports."""
        return self._find_head(with_deferred=True, advances=False)

    def remove(self, request: Request) -> None:
        level = self._levels[self._level_key(request)]
        level.lane(request).remove(request)
        self._drop(request, level)

    def admit(self, request: Request, num_tokens: int) -> None:
        """Take out a request that gets a row; its session is charged num_tokens."""
        level = self._levels[self._level_key(request)]
        level.lane(request).admit(request, num_tokens)
        self._drop(request, level)

    def defer(self, request: Request) -> None:
        """Let shorter prompts be admitted before this one: see `max_num_partial_prefills`."""
        self._heads.clear()
        self._in_line.remove(request)
        level = self._levels[self._level_key(request)]
        before = level.lane(request)
        request.waits_for |= {PARTIAL_PREFILLS}
        self.deferred.push(request)
        # In this order: a session whose last request leaves would lose its turn.
        level.lane(request).push(request)
        before.remove(request)

    def _find_head(self, with_deferred: bool, advances: bool = True) -> Request | None:
        first = self._in_line.head()
        deferred = self.deferred.head() if with_deferred else None
        if first is None or (deferred and self._precedence(deferred) < self._precedence(first)):
            first = deferred
        if first is None:
            return None
        return self._levels[self._level_key(first)].head(with_deferred, advances)

    def _level_key(self, request: Request) -> int:
        return request.priority if self._has_priorities else 0

    def _drop(self, request: Request, level: PriorityLevel) -> None:
        """Forget a request that is in no lane of its level any more."""
        self._heads.clear()
        if request.waits_for:
            self.deferred.remove(request)
            request.waits_for -= {PARTIAL_PREFILLS}
        else:
            self._in_line.remove(request)
        level.num_requests -= 1
        if not level.num_requests:
            del self._levels[self._level_key(request)]
