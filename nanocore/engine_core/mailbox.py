"""The two queues between the io thread and the step loop, and their events.

These events stay inside the process; they are not the wire's messages. The step loop sleeps on its
inbox when it has nothing to do. The io thread sleeps in its socket's poller, and the outbox wakes
it.
"""

from __future__ import annotations

from queue import SimpleQueue
from typing import Final

import msgspec

from nanocore.engine_core.grammars.token_matcher import Compiled
from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.engine_core.waking_queue import WakingQueue
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
Outbox = WakingQueue[OutboxEvent]
