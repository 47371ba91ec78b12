"""The waiting queue: requests without a row, and samples that wait for one of them.

Only the head is admitted, but for prompts of several chunks: when no more of them may be running
(`max_num_partial_prefills`) they step aside, and shorter ones pass them by.

Of several samples of a prompt one is in the queue, and holds the others back until all of its
prompt is planned: they find it in the prefix cache then.
"""

from __future__ import annotations

from collections.abc import Iterator

from nanocore.engine_core.scheduling.precedence import PrecedenceKey
from nanocore.engine_core.scheduling.request import Request
from nanocore.engine_core.scheduling.request_heap import RequestHeap


class WaitingQueue:
    """precedence: sort key of requests. long: those that stepped aside."""

    def __init__(self, precedence: PrecedenceKey) -> None:
        self._precedence = precedence
        self._requests = RequestHeap(precedence)
        self.long = RequestHeap(precedence)

    def __len__(self) -> int:
        """Requests that can be admitted: samples that are held back are not among them."""
        return len(self._requests) + len(self.long)

    def __iter__(self) -> Iterator[Request]:
        """Those that did not step aside, in their order."""
        return iter(self._requests)

    def push(self, request: Request) -> None:
        """Queue a request, in its place."""
        self._requests.push(request)

    def head(self, may_be_long: bool = True) -> Request | None:
        """The request that goes first. may_be_long: those that stepped aside may go, too."""
        head = self._requests.head()
        long_head = self.long.head() if may_be_long else None
        if head is None or long_head is None:
            return long_head if head is None else head
        return min(head, long_head, key=self._precedence)

    def remove(self, request: Request) -> None:
        """Take out a request that can be admitted."""
        (self._requests if request in self._requests else self.long).remove(request)

    def step_aside(self, request: Request) -> None:
        """Let others pass this one by."""
        self.remove(request)
        self.long.push(request)

    def leave(self, request: Request) -> None:
        """Take a request without a row from wherever it waits."""
        if (leader := request.leader) is not None:
            leader.held_back = [one for one in leader.held_back if one is not request]
        else:
            self.remove(request)

    def release(self, leader: Request) -> None:
        """Queue the samples that a request holds back: its prompt is planned, so it is cached.

        They came with it, and so before all that came after it.
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
