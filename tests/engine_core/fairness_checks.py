"""What sessions are given while one of them waits, counted beside the queue and not by it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.scheduling.scheduler import Scheduler


class FairnessWatch:
    """Holds admissions of one priority to the bound of `DeficitRoundRobin`, as they come.

    Each other session is given at most what a waiting one was given the last time, one quantum, and
    one largest request; who never was given anything waits for one request of each.
    """

    def __init__(self, quantum_tokens: int) -> None:
        self._quantum_tokens = quantum_tokens
        self._last_cost: dict[int, int] = {}  # by session
        self._given: dict[int, Counter[int]] = {}  # by session that waits: tokens, by other one
        self._count: dict[int, Counter[int]] = {}  # likewise: requests
        self._largest: Counter[int] = Counter()

    def waits(self, clients: Iterable[int]) -> None:
        """These sessions have requests waiting now, and no others."""
        waiting = set(clients)
        for client in self._given.keys() - waiting:
            del self._given[client], self._count[client]
        for client in waiting - self._given.keys():
            self._given[client], self._count[client] = Counter(), Counter()
        if not waiting:
            self._last_cost.clear()  # debts are forgiven when nobody waits

    def admitted(self, client: int, num_tokens: int, has_more: bool) -> None:
        """A session's request was, for the first time, with so many tokens to compute.

        has_more: it has others waiting.
        """
        cost = max(num_tokens, self._quantum_tokens)
        self._largest[client] = max(self._largest[client], cost)
        for waiting, given in self._given.items():
            if waiting == client:
                continue
            given[client] += cost
            self._count[waiting][client] += 1
            if waiting in self._last_cost:
                most = self._last_cost[waiting] + self._quantum_tokens + self._largest[client]
                assert given[client] <= most, f"{waiting} waits, {client} got {given[client]}"
            else:
                assert self._count[waiting][client] <= 1, f"{client} goes before who came anew"
        self._last_cost[client] = cost
        self._given.pop(client, None)
        self._count.pop(client, None)
        if has_more:
            self._given[client], self._count[client] = Counter(), Counter()


class SchedulerFairness:
    """Watches a scheduler: call `planned` after each `schedule`, `changed` after all else.

    Not for schedulers whose long prompts step aside.
    """

    def __init__(self, scheduler: Scheduler, quantum_tokens: int) -> None:
        self._scheduler = scheduler
        self._watches: dict[int, FairnessWatch] = defaultdict(lambda: FairnessWatch(quantum_tokens))
        self._has_priorities = scheduler.config.policy == "priority"

    def changed(self) -> None:
        """Requests may have come to wait, or do so no more."""
        waiting = self._waiting()
        for level in {*waiting, *self._watches}:
            self._watches[level].waits(waiting[level])

    def planned(self) -> None:
        """A step was planned: whom it admitted, in this order."""
        waiting, new = self._waiting(), self._scheduler.planned.new
        own = [(self._level(request), request.client) for request in new]
        for i, request in enumerate(new):
            level, client = own[i]
            num_cached = self._scheduler.running.num_cached[request.row]
            num_tokens = request.num_submitted_tokens - int(num_cached)
            has_more = client in waiting[level] or own[i] in own[i + 1 :]
            self._watches[level].admitted(client, num_tokens, has_more)
        self.changed()

    def _waiting(self) -> dict[int, set[int]]:
        """Sessions with requests that were not admitted yet, by level."""
        waiting: dict[int, set[int]] = defaultdict(set)
        for request in self._scheduler.waiting:
            if request.num_cached_tokens is None:
                waiting[self._level(request)].add(request.client)
        return waiting

    def _level(self, request: Request) -> int:
        return request.priority if self._has_priorities else 0
