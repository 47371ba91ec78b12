"""Whose turn it is: sessions that wait for the same thing get equal shares of what is admitted.

Deficit round robin (Shreedhar & Varghese 1996), paid afterwards: when a session's turn comes one
request of it is admitted, whatever it costs, and the session's next turn is as many rounds later as
that cost quanta. So a turn does not depend on what is going to be admitted, and rounds in which
nobody could be are skipped. It costs the prompt tokens that are to be computed, and a quantum at
least, because the row that it takes is worth something, too: small requests go one by one.

Between two admissions of a session that has requests waiting every other one is given at most what
that session was, one quantum, and one largest request. Who comes anew waits for at most one request
of each. Belongs to the step loop.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Final, TypeAlias

QUANTUM_TOKENS: Final = 512
Turn: TypeAlias = tuple[int, int]
"""(round, place in line); the smaller one comes first. A session's only grows."""


@dataclass(slots=True)
class _Account:
    """A session's. num_tokens: paid for and not yet a quantum. is_listed: among the absent."""

    turn: Turn
    num_tokens: int = 0
    num_waiting: int = 0
    is_listed: bool = False


class Turns:
    """Of sessions that have requests waiting, and of others as long as they are in debt."""

    def __init__(self, quantum_tokens: int = QUANTUM_TOKENS) -> None:
        self._quantum_tokens = quantum_tokens
        self._round = 0
        self._num_places = 0
        self._accounts: dict[int, _Account] = {}
        self._absent: list[tuple[int, int]] = []  # (round, client); perhaps back since

    def __len__(self) -> int:
        return len(self._accounts)

    def of(self, client: int) -> Turn:
        """When it is the turn of a session that has a request waiting."""
        return self._accounts[client].turn

    def enter(self, client: int) -> None:
        """One more request of the session waits. Who comes anew is last in this round."""
        account = self._accounts.get(client)
        if account is None:
            account = self._accounts[client] = _Account((self._round, self._next_place()))
        account.num_waiting += 1

    def leave(self, client: int) -> None:
        """One less waits. With the last the session's turn is lost, unless it is still to pay."""
        account = self._accounts[client]
        account.num_waiting -= 1
        if not account.num_waiting:
            self._forget_or_list(client, account)

    def come_to(self, turn: Turn) -> None:
        """It is this turn, and stays so whoever comes now."""
        self._round = max(self._round, turn[0])
        while self._absent and self._absent[0][0] <= self._round:
            client = heapq.heappop(self._absent)[1]
            account = self._accounts[client]
            account.is_listed = False
            if not account.num_waiting:
                self._forget_or_list(client, account)

    def charge(self, client: int, num_tokens: int) -> None:
        """A request that has been waiting is admitted, of so many tokens to compute."""
        account = self._accounts[client]
        account.num_tokens += max(num_tokens, self._quantum_tokens)
        num_rounds, account.num_tokens = divmod(account.num_tokens, self._quantum_tokens)
        now = max(self._round, account.turn[0])
        account.turn = now + num_rounds, self._next_place()

    def _forget_or_list(self, client: int, account: _Account) -> None:
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
