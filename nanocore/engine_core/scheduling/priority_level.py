"""The waiting requests of one priority, among which sessions are served by turns.

Those that stepped aside may not always go, so they are kept apart; a session has its one turn
wherever its requests wait, and with requests at both places it sends the one that came first.
"""

from __future__ import annotations

from nanocore.engine_core.scheduling.precedence import PrecedenceKey
from nanocore.engine_core.scheduling.request import Request
from nanocore.engine_core.scheduling.session_heaps import Candidate, SessionHeaps
from nanocore.engine_core.scheduling.turns import QUANTUM_TOKENS, Turns


class PriorityLevel:
    """precedence: sort key inside a session. num_requests: that wait here."""

    def __init__(self, precedence: PrecedenceKey, quantum_tokens: int = QUANTUM_TOKENS) -> None:
        self.num_requests = 0
        self._turns = Turns(quantum_tokens)
        self._others = SessionHeaps(precedence, self._turns)
        self._long = SessionHeaps(precedence, self._turns)

    def push(self, request: Request) -> None:
        """Let a request wait."""
        self._others.push(request)
        self.num_requests += 1

    def step_aside(self, request: Request) -> None:
        """Keep a request with the long ones from here on; its session's turn stays."""
        self._long.push(request)
        self._others.remove(request)

    def remove(self, request: Request, is_long: bool) -> None:
        """Take out a request. is_long: it stepped aside."""
        self._at(is_long).remove(request)
        self.num_requests -= 1

    def admit(self, request: Request, is_long: bool, num_tokens: int) -> None:
        """Take out a request that gets a row, and so many tokens to compute: its session pays."""
        self._at(is_long).admit(request, num_tokens)
        self.num_requests -= 1

    def head(self, may_be_long: bool) -> Request | None:
        """Who goes first. The same until somebody is taken out, or comes back or steps aside."""
        first = self._first(may_be_long)
        if first is None:
            return None
        turn, _, request = first
        self._turns.come_to(turn)
        return request

    def peek(self) -> Request | None:
        """The head, whose turn does not come by this."""
        first = self._first(may_be_long=True)
        return first and first[2]

    def _first(self, may_be_long: bool) -> Candidate | None:
        first = self._others.first()
        first_long = self._long.first() if may_be_long else None
        if first is None or (first_long is not None and first_long < first):
            first = first_long
        return first

    def _at(self, is_long: bool) -> SessionHeaps:
        return self._long if is_long else self._others
