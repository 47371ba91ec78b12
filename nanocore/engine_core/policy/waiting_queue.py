"""The waiting queue: requests without a row, ordered by priority, then fairly by session.

    WaitingQueue → PriorityLevel (one per priority) → SessionQueues → RequestHeap (one per session)

The request with the smallest precedence decides which priority is served. Within a priority,
sessions are served by deficit round robin, so one session with many requests cannot hold up
another. With ageing, an old request may bring its priority to the front; which of that priority's
sessions goes then is still decided by deficit round robin.

Only the head of the queue is admitted; no other request passes it. There is one exception: when as
many prompts are computed in chunks as `max_num_partial_prefills` allows, a long prompt at the head
is deferred, and shorter ones are admitted before it. Of the sibling samples of a prompt (n > 1) one
is queued and the others wait behind it until all of its prompt is planned: then they find its
blocks in the prefix cache.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import msgspec

from nanocore.engine_core.policy.order import Precedence, PrecedenceKey
from nanocore.engine_core.requests.request import Request

QUANTUM_TOKENS: Final = 512
_MIN_STALE_ENTRIES: Final = 64
"""Removed entries stay in a heap until they are more than this and twice the live ones."""
_BEFORE_ALL: Final = -1, 0

Turn: TypeAlias = tuple[int, int]
"""(round, place in line) of a session; the smaller one is served first. A session's only grows."""
Candidate: TypeAlias = tuple[Turn, Precedence, Request]
"""The smallest is served first; no two requests have the same precedence."""


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
        elif len(self._heap) > _MIN_STALE_ENTRIES + 2 * len(self._requests):
            self._heap = [entry for entry in self._heap if entry[1] in self._requests]
            heapq.heapify(self._heap)


class _Account(msgspec.Struct):
    """One session's share. num_tokens: charged, below one quantum. is_listed: in `_absent`."""

    turn: Turn
    num_tokens: int = 0
    num_waiting: int = 0
    is_listed: bool = False


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
        self._absent: list[tuple[int, int]] = []  # heap of (round, client); some have returned

    def __len__(self) -> int:
        return len(self._accounts)

    def of(self, client: int) -> Turn:
        """Return the turn of a session that has a request waiting."""
        return self._accounts[client].turn

    def enter(self, client: int) -> None:
        """Count one more waiting request. A new session is last in the current round."""
        account = self._accounts.get(client)
        if account is None:
            account = self._accounts[client] = _Account((self._round, self._next_place()))
        account.num_waiting += 1

    def leave(self, client: int) -> None:
        """Count one less. A session without requests is forgotten, unless it is still in debt."""
        account = self._accounts[client]
        account.num_waiting -= 1
        if not account.num_waiting:
            self._forget_or_list(client, account)

    def advance_to(self, turn: Turn) -> None:
        """Make this the current turn; sessions that enter from now on come after it."""
        self._round = max(self._round, turn[0])
        while self._absent and self._absent[0][0] <= self._round:
            client = heapq.heappop(self._absent)[1]
            account = self._accounts[client]
            account.is_listed = False
            if not account.num_waiting:
                self._forget_or_list(client, account)

    def charge(self, client: int, num_tokens: int) -> None:
        """Charge a session for an admitted request with this many uncached tokens."""
        account = self._accounts[client]
        account.num_tokens += max(num_tokens, self._quantum_tokens)
        num_rounds, account.num_tokens = divmod(account.num_tokens, self._quantum_tokens)
        now = max(self._round, account.turn[0])
        account.turn = now + num_rounds, self._next_place()

    def _forget_or_list(self, client: int, account: _Account) -> None:
        # A session in debt must not lose its debt by having no request for a moment: it is kept
        # until the round in which the debt is paid.
        if account.is_listed:
            return
        if account.turn[0] <= self._round:
            del self._accounts[client]
        else:
            account.is_listed = True
            heapq.heappush(self._absent, (account.turn[0], client))

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
            if len(self._order) > _MIN_STALE_ENTRIES + 2 * len(self._heaps):
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
    """The waiting requests of one priority.

    Deferred requests are kept apart because they may not always go. A session has one turn for both
    places; with requests in both it sends the one that came first.
    """

    def __init__(self, precedence: PrecedenceKey, quantum_tokens: int = QUANTUM_TOKENS) -> None:
        self.num_requests = 0
        self._fairness = DeficitRoundRobin(quantum_tokens)
        self._others = SessionQueues(precedence, self._fairness)
        self._deferred = SessionQueues(precedence, self._fairness)

    def push(self, request: Request) -> None:
        self._others.push(request)
        self.num_requests += 1

    def defer(self, request: Request) -> None:
        """Move a request to the deferred ones. Its session keeps its turn."""
        # In this order: a session whose last request leaves would lose its turn.
        self._deferred.push(request)
        self._others.remove(request)

    def remove(self, request: Request, is_deferred: bool) -> None:
        self._queues(is_deferred).remove(request)
        self.num_requests -= 1

    def admit(self, request: Request, is_deferred: bool, num_tokens: int) -> None:
        """Take out a request that gets a row; its session is charged num_tokens."""
        self._queues(is_deferred).admit(request, num_tokens)
        self.num_requests -= 1

    def head(self, with_deferred: bool) -> Request | None:
        """Return the request to serve first, and make its turn the current one.

        The result stays the same until a request is taken out, preempted or deferred.
        """
        first = self._first(with_deferred)
        if first is None:
            return None
        turn, _, request = first
        self._fairness.advance_to(turn)
        return request

    def peek(self) -> Request | None:
        """Return the head without advancing the turn."""
        first = self._first(with_deferred=True)
        return first and first[2]

    def _first(self, with_deferred: bool) -> Candidate | None:
        first = self._others.first()
        deferred = self._deferred.first() if with_deferred else None
        if first is None or (deferred is not None and deferred < first):
            first = deferred
        return first

    def _queues(self, is_deferred: bool) -> SessionQueues:
        return self._deferred if is_deferred else self._others


class WaitingQueue:
    """All requests without a row.

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
        self._requests = RequestHeap(precedence)
        self.deferred = RequestHeap(precedence)
        self._levels: dict[int, PriorityLevel] = {}  # by priority; none is empty
        # The head is asked for several times a step, so it is kept until the next change.
        self._heads: dict[bool, Request | None] = {}  # by with_deferred

    def __len__(self) -> int:
        """Count the requests that can be admitted; siblings that wait behind one do not count."""
        return len(self._requests) + len(self.deferred)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over requests that are not deferred, by precedence."""
        return iter(self._requests)

    def push(self, request: Request) -> None:
        self._heads.clear()
        self._requests.push(request)
        key = self._level_key(request)
        if key not in self._levels:
            self._levels[key] = PriorityLevel(self._precedence, self._quantum_tokens)
        self._levels[key].push(request)

    def head(self, with_deferred: bool = True) -> Request | None:
        """Return the request to admit next. with_deferred: deferred ones may go, too."""
        if with_deferred not in self._heads:
            self._heads[with_deferred] = self._find_head(with_deferred)
        return self._heads[with_deferred]

    def peek(self) -> Request | None:
        """Return the head without advancing its session's turn: for reports."""
        first = self._first_by_precedence(with_deferred=True)
        return first and self._levels[self._level_key(first)].peek()

    def remove(self, request: Request) -> None:
        is_deferred = self._take_out(request)
        self._levels[self._level_key(request)].remove(request, is_deferred)
        self._drop_empty_level(request)

    def admit(self, request: Request, num_tokens: int) -> None:
        """Take out a request that gets a row; its session is charged num_tokens."""
        is_deferred = self._take_out(request)
        self._levels[self._level_key(request)].admit(request, is_deferred, num_tokens)
        self._drop_empty_level(request)

    def defer(self, request: Request) -> None:
        """Let shorter prompts be admitted before this one: see `max_num_partial_prefills`."""
        self._heads.clear()
        self._requests.remove(request)
        self.deferred.push(request)
        self._levels[self._level_key(request)].defer(request)

    def leave(self, request: Request) -> None:
        """Take out a request that ended, from the queue or from behind its sibling."""
        if (sibling := request.awaited_sibling) is not None:
            siblings = sibling.waiting_siblings
            sibling.waiting_siblings = [one for one in siblings if one is not request]
        else:
            self.remove(request)

    def release_siblings(self, request: Request) -> None:
        """Queue the samples behind a request whose prompt is planned: they hit its blocks.

        They arrived with it, so they go before everything that arrived later in their session.
        """
        if request.waiting_siblings:
            siblings, request.waiting_siblings = request.waiting_siblings, ()
            for sibling in siblings:
                sibling.awaited_sibling = None
                self.push(sibling)

    def promote_sibling(self, request: Request) -> None:
        """Let the next sample compute the prompt: this one ended before its prompt was planned."""
        (next_sample, *others), request.waiting_siblings = request.waiting_siblings, ()
        next_sample.awaited_sibling = None
        next_sample.waiting_siblings = others
        for sibling in others:
            sibling.awaited_sibling = next_sample
        self.push(next_sample)

    def _find_head(self, with_deferred: bool) -> Request | None:
        first = self._first_by_precedence(with_deferred)
        return first and self._levels[self._level_key(first)].head(with_deferred)

    def _first_by_precedence(self, with_deferred: bool) -> Request | None:
        first = self._requests.head()
        deferred = self.deferred.head() if with_deferred else None
        if first is None or (deferred and self._precedence(deferred) < self._precedence(first)):
            first = deferred
        return first

    def _level_key(self, request: Request) -> int:
        return request.priority if self._has_priorities else 0

    def _take_out(self, request: Request) -> bool:
        """Remove it from the heap that has it; return whether it was deferred."""
        self._heads.clear()
        is_deferred = request not in self._requests
        (self.deferred if is_deferred else self._requests).remove(request)
        return is_deferred

    def _drop_empty_level(self, request: Request) -> None:
        key = self._level_key(request)
        if not self._levels[key].num_requests:
            del self._levels[key]
