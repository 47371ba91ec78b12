"""The waiting queue: requests without a row, and samples that wait for one of them.

The request with the smallest key says whose priority's turn it is; of that priority's, sessions
send theirs by turns (see `Turns`). With ageing an old request makes its priority's turn come, in
which another session's may go first. A session alone is served in the order of the keys.

Only the head is admitted, but for prompts of several chunks: when no more of them may be running
(`max_num_partial_prefills`) they step aside, and shorter ones pass them by. Of several samples of a
prompt one is in the queue, and holds the others back until all of its prompt is planned: they find
it in the prefix cache then.
"""

from __future__ import annotations

from collections.abc import Iterator

from nanocore.engine_core.scheduling.precedence import PrecedenceKey
from nanocore.engine_core.scheduling.priority_level import PriorityLevel
from nanocore.engine_core.scheduling.request import Request
from nanocore.engine_core.scheduling.request_heap import RequestHeap
from nanocore.engine_core.scheduling.turns import QUANTUM_TOKENS


class WaitingQueue:
    """precedence: sort key of requests. has_priorities: it heeds them; else all are of one.

    long: those that stepped aside.
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
        self.long = RequestHeap(precedence)
        self._levels: dict[int, PriorityLevel] = {}  # by priority; none is empty
        self._heads: dict[bool, Request | None] = {}  # that were found since the last change

    def __len__(self) -> int:
        """Requests that can be admitted: samples that are held back are not among them."""
        return len(self._requests) + len(self.long)

    def __iter__(self) -> Iterator[Request]:
        """Those that did not step aside, in the order of their keys."""
        return iter(self._requests)

    def push(self, request: Request) -> None:
        """Queue a request, in its place."""
        self._heads.clear()
        self._requests.push(request)
        key = self._level_key(request)
        if key not in self._levels:
            self._levels[key] = PriorityLevel(self._precedence, self._quantum_tokens)
        self._levels[key].push(request)

    def head(self, may_be_long: bool = True) -> Request | None:
        """The request that goes first. may_be_long: those that stepped aside may go, too."""
        if may_be_long not in self._heads:
            self._heads[may_be_long] = self._find_head(may_be_long)
        return self._heads[may_be_long]

    def peek(self) -> Request | None:
        """The head, for those who only look: it is nobody's turn by this."""
        first = self._first_by_key(may_be_long=True)
        return first and self._levels[self._level_key(first)].peek()

    def remove(self, request: Request) -> None:
        """Take out a request that can be admitted."""
        is_long = self._take_out(request)
        self._levels[self._level_key(request)].remove(request, is_long)
        self._drop_empty_level(request)

    def admit(self, request: Request, num_tokens: int) -> None:
        """Take out a request because it gets a row; its session pays for so many tokens."""
        is_long = self._take_out(request)
        self._levels[self._level_key(request)].admit(request, is_long, num_tokens)
        self._drop_empty_level(request)

    def step_aside(self, request: Request) -> None:
        """Let others pass this one by."""
        self._heads.clear()
        self._requests.remove(request)
        self.long.push(request)
        self._levels[self._level_key(request)].step_aside(request)

    def leave(self, request: Request) -> None:
        """Take a request without a row from wherever it waits."""
        if (leader := request.leader) is not None:
            leader.held_back = [one for one in leader.held_back if one is not request]
        else:
            self.remove(request)

    def release(self, leader: Request) -> None:
        """Queue the samples that a request holds back: its prompt is planned, so it is cached.

        They came with it, and so before all that came after it in their session.
        """
        if leader.held_back:
            samples, leader.held_back = leader.held_back, ()
            for sample in samples:
                sample.leader = None
                self.push(sample)

    def replace(self, leader: Request) -> None:
        """It has ended before its prompt was planned: the next sample does it for the others."""
        (heir, *others), leader.held_back = leader.held_back, ()
        heir.leader, heir.held_back = None, others
        for sample in others:
            sample.leader = heir
        self.push(heir)

    def _find_head(self, may_be_long: bool) -> Request | None:
        first = self._first_by_key(may_be_long)
        return first and self._levels[self._level_key(first)].head(may_be_long)

    def _first_by_key(self, may_be_long: bool) -> Request | None:
        first, long = self._requests.head(), self.long.head() if may_be_long else None
        if first is None or (long and self._precedence(long) < self._precedence(first)):
            first = long
        return first

    def _level_key(self, request: Request) -> int:
        return request.priority if self._has_priorities else 0

    def _take_out(self, request: Request) -> bool:
        """Whether it had stepped aside."""
        self._heads.clear()
        is_long = request not in self._requests
        (self.long if is_long else self._requests).remove(request)
        return is_long

    def _drop_empty_level(self, request: Request) -> None:
        key = self._level_key(request)
        if not self._levels[key].num_requests:
            del self._levels[key]
