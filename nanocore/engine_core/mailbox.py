"""The two queues between the io thread and the step loop, and their events.

These events stay inside the process; they are not the wire's messages. The step loop sleeps on its
inbox when it has nothing to do. The io thread sleeps in the socket's poller, so the outbox also has
a file descriptor.
"""

from __future__ import annotations

import os
import select
from collections import deque
from contextlib import suppress
from queue import SimpleQueue
from typing import Final

import msgspec

from nanocore.engine_core.grammars.matcher import Compiled
from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.protocol.messages import ControlOperation, FinishReason, Reply

SIGNAL_POLL_S: Final = 1.0
"""Longest sleep of the main thread. A signal that comes between Python's look for signals
and the wait in the system is handled only after that."""


class AddRequest(msgspec.Struct, frozen=True):
    """To the step loop: a validated request, which may have to wait for its grammar."""

    request: Request


class AbortRequests(msgspec.Struct, frozen=True):
    """To the step loop: end these. Handles that have ended are ignored.

    reason, message: what their clients are told.
    """

    handles: list[int]
    reason: FinishReason = "abort"
    message: str | None = None


class ControlCall(msgspec.Struct, frozen=True):
    """To the step loop: an operation to run between steps."""

    client: int
    call_id: int
    operation: ControlOperation


class Shutdown(msgspec.Struct, frozen=True):
    """To the step loop: end every request and return. Put by signal handlers, too.

    To the io thread, as the last event: tell every client and return. failure: not on purpose.
    """

    reason: str
    failure: bool = False


class BeginDrain(msgspec.Struct, frozen=True):
    """To the io thread: finish open requests, then end the engine. Put by signal handlers, too."""

    cause: str


class ControlReply(msgspec.Struct, frozen=True):
    """To the io thread: the reply to a ControlCall."""

    client: int
    reply: Reply


class GrammarDone(msgspec.Struct, frozen=True):
    """To the step loop, from a compiling thread: the result for a request.

    The step loop hands it on to the io thread, which answers the SUBMIT, unless the request has
    ended meanwhile. handle: of its first sample. at_s: monotonic time of the result.
    """

    handle: int
    compiled: Compiled
    at_s: float


InboxEvent = AddRequest | AbortRequests | GrammarDone | ControlCall | Shutdown
OutboxEvent = ClientOutput | ControlReply | GrammarDone | BeginDrain | Shutdown
Inbox = SimpleQueue[InboxEvent]


class Outbox:
    """A queue whose reader sleeps in a poller: `fd` is readable while the queue is not empty.

    Any thread puts and one drains. A writer wakes the reader once per burst, not once per event.
    Whoever marks the reader as woken wakes it afterwards, so who finds it marked need not: what it
    has appended is taken either by the drain that takes the mark away, or after that wake-up.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)
        self._events: deque[OutboxEvent] = deque()
        self._woken = False  # the reader will drain what is in the queue now

    def put(self, event: OutboxEvent) -> None:
        self._events.append(event)
        if not self._woken:
            self._woken = True
            os.eventfd_write(self.fd, 1)

    def drain(self) -> list[OutboxEvent]:
        """Take all events, in order; never waits."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        # In this order: what is appended before this line is taken now, and what is appended after
        # it has a wake-up of its own. A wake-up for nothing may come of it; none is lost.
        self._woken = False
        return [self._events.popleft() for _ in range(len(self._events))]

    def wait(self, timeout_s: float) -> None:
        self._poll.poll(timeout_s * 1e3)

    def close(self) -> None:
        os.close(self.fd)
