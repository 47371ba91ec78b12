"""Handles SUBMIT and ABORT, deadlines, and requests that wait for their grammars.

A request is given to the step loop when it is accepted. One whose grammar is not known yet waits
here until it is compiled, and keeps its SUBMIT's place in the queue: it has its handles and its
arrival from then. The step loop never knows a request that ends before. A deadline counts from the
SUBMIT, too.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from nanocore.engine_core.grammars.matcher import GrammarSource
from nanocore.engine_core.io.admission import Admission, end_by_outputs
from nanocore.engine_core.io.limits import QueueLimit
from nanocore.engine_core.io.session import Session, SessionTable
from nanocore.engine_core.mailbox import AbortRequests, AddRequest, GrammarDone, Inbox
from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.scheduling.outputs import ClientOutput, split_events
from nanocore.protocol.codec import abort_handles, returned_id
from nanocore.protocol.errors import (
    ContextLengthError,
    EngineOverloadedError,
    ErrorCode,
    InvalidRequestError,
)
from nanocore.protocol.messages import Abort, Accepted, Error, Event, FinishReason, Message, Submit

_MIN_SWEPT: Final = 64
"""Entries of ended requests that are left alone."""


class Deadlines:
    """When requests with a `timeout_s` must end: a heap of their samples. Belongs to the io thread.

    Ended requests are skipped when they reach the head, and swept out when they are the majority.
    So the cost per request is constant, and a deadline in a week holds no memory for a week.

    open_handles: samples that have not ended; read at every call.
    """

    def __init__(self, open_handles: Collection[int]) -> None:
        self._open_handles = open_handles
        self._heap: list[tuple[float, Sequence[int]]] = []

    def __len__(self) -> int:
        """Entries, including ended requests that were not swept out."""
        return len(self._heap)

    @property
    def next_s(self) -> float:
        """Time of the next deadline; infinity if there is none."""
        while self._heap and not self._open(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def add(self, handles: Sequence[int], deadline_s: float) -> None:
        if len(self._heap) > 2 * len(self._open_handles) + _MIN_SWEPT:
            self._heap = [entry for entry in self._heap if self._open(entry[1])]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (deadline_s, handles))

    def take_passed(self, now_s: float) -> list[int]:
        """Remove and return the open samples whose deadlines have passed."""
        passed = []
        while self.next_s <= now_s:
            passed += self._open(heapq.heappop(self._heap)[1])
        return passed

    def _open(self, handles: Sequence[int]) -> list[int]:
        return [handle for handle in handles if handle in self._open_handles]


class CompilingRequests:
    """Requests that wait until their grammars are compiled. Belongs to the io thread.

    They are validated, have handles and are counted into the queue, where each keeps the place of
    its SUBMIT; the step loop does not know them yet.

    grammars: compiles. queue_limit: counts the requests. done: takes the events, from any thread.
    num_aborts: samples that were aborted here.
    """

    def __init__(
        self, grammars: GrammarSource, queue_limit: QueueLimit, done: Callable[[GrammarDone], None]
    ) -> None:
        self.num_aborts = 0
        self._grammars = grammars
        self._queue_limit = queue_limit
        self._done = done
        self._requests: dict[int, tuple[Request, int]] = {}  # by the first sample's handle
        self._withdrawals: dict[int, Callable[[], None]] = {}  # likewise
        self._leaders: dict[int, int] = {}  # that handle, by each sample's

    def __len__(self) -> int:
        """Number of waiting samples."""
        return len(self._leaders)

    def __contains__(self, handle: int) -> bool:
        return handle in self._leaders

    def add(self, request: Request, arrival: int) -> None:
        """Compile the request's grammar. arrival: number of steps before it came."""
        handle, wanted = request.handle, request.sampling.structured_outputs
        assert wanted is not None
        assert request.token_ids is not None
        output = request.token_ids[request.num_prompt_tokens :].tolist()
        self._requests[handle] = request, arrival
        self._leaders.update((sample.handle, handle) for sample in request.samples)
        self._withdrawals[handle] = self._grammars.compile(
            wanted,
            lambda compiled: self._done(GrammarDone(handle, compiled)),
            request.client,
            output,
        )

    def take(self, handle: int) -> tuple[Request, int] | None:
        """Remove the request with this first handle; return it and its arrival, or None if it is
        gone.
        """
        taken = self._requests.pop(handle, None)
        if taken is not None:
            self._withdrawals.pop(handle)()  # nothing is left of it, if it is done
            for sample in taken[0].samples:
                del self._leaders[sample.handle]
        return taken

    def leave_queue(self, request: Request) -> None:
        """Give back the queue place of a request that ends here."""
        num_samples = len(request.samples)
        self._queue_limit.leave(request.num_submitted_tokens, num_samples, request.num_bytes)

    def abort(self, handles: Iterable[int]) -> list[Request]:
        """End the waiting requests that own any of these samples; return them."""
        aborted = [taken[0] for handle in handles if (taken := self.take(handle)) is not None]
        for request in aborted:
            self.leave_queue(request)
            self.num_aborts += len(request.samples)
        return aborted


class RequestHandler:
    """Handles SUBMIT and ABORT, and requests that wait for their grammars.

    num_steps: reads the step counter. send, send_output: send to a session at a time, which may
    close it.
    """

    def __init__(
        self,
        sessions: SessionTable,
        inbox: Inbox,
        admission: Admission,
        compiling: CompilingRequests,
        num_steps: Callable[[], int],
        send: Callable[[Session, Message, float], None],
        send_output: Callable[[Session, ClientOutput, float], None],
    ) -> None:
        self.compiling = compiling
        self.deadlines = Deadlines(sessions.request_ids)
        self._sessions = sessions
        self._inbox = inbox
        self._admission = admission
        self._num_steps = num_steps
        self._send = send
        self._send_output = send_output
        self._num_handles = 0

    def submit(self, session: Session, submit: Submit, now_s: float) -> None:
        if submit.request_id in session.requests:
            text = f"request_id {submit.request_id!r} is in use in this session: choose another"
            code: ErrorCode = "duplicate_request_id"
            self._send(session, Error(code=code, message=text, request_id=submit.request_id), now_s)
            return
        try:
            if submit.priority < 0 and not session.is_admin:
                raise InvalidRequestError(
                    f"priority={submit.priority}: values below 0 are for administrators; use 0 or "
                    "more"
                )
            handle, is_only = self._num_handles + 1, not session.requests
            request = self._admission.build(submit, handle, session.client, is_only)
        except (EngineOverloadedError, InvalidRequestError) as error:
            self._refuse(session, submit.request_id, error, now_s)
            return
        for sample in request.samples:
            sample.received_s = now_s
        handles = [sample.handle for sample in request.samples]
        self._num_handles = handles[-1]
        self._sessions.add_request(session, submit.request_id, handles)
        if submit.timeout_s is not None:
            self.deadlines.add(handles, now_s + submit.timeout_s)
        if request.awaits_grammar:
            self.compiling.add(request, self._num_steps())
        else:
            self._start(session, AddRequest(request), now_s)

    def go_on(self, event: GrammarDone, now_s: float) -> None:
        """Answer the SUBMIT of a request whose grammar is compiled, or was refused."""
        taken = self.compiling.take(event.handle)
        if taken is None:
            return  # its client does not want it any more
        request, arrival = taken
        session = self._sessions.by_client[request.client]
        if isinstance(event.compiled, Exception):
            self.compiling.leave_queue(request)
            self._end(session, request)
            self._refuse(session, request.request_id, event.compiled, now_s)
        else:
            request.follow(event.compiled)
            for sample in request.samples:
                sample.compiled_s = now_s
            self._start(session, AddRequest(request, arrival), now_s)

    def abort(self, session: Session, message: Abort, now_s: float) -> None:
        """End the samples that an ABORT names, as far as they belong to the session and are
        open.
        """
        single = abort_handles(message)
        own = [handle for i in message.request_ids for handle in session.requests.get(i, ())]
        self._end_compiling(own, "abort", None, now_s)
        # Nobody was told the handles of one that waits: alone they name nothing.
        named = [
            handle for handle in dict.fromkeys([*own, *single]) if handle not in self.compiling
        ]
        self._abort([handle for handle in named if self._sessions.owns(session, handle)])

    def forget(self, handles: list[int]) -> None:
        """Abort the requests of a closed session. handles: all its samples."""
        unknown = {
            sample.handle for request in self.compiling.abort(handles) for sample in request.samples
        }
        self._abort([handle for handle in handles if handle not in unknown])

    def end_compiling(self, session: Session, message: str, now_s: float) -> None:
        """End the session's requests that wait to be compiled, as the step loop ends its own."""
        handles = [handle for own in session.requests.values() for handle in own]
        self._end_compiling(handles, "abort", message, now_s)

    def end_overdue(self, now_s: float) -> None:
        """End requests that have passed their deadlines.

        A request that finishes in the same step ends once, as with an abort.
        """
        if not (passed := self.deadlines.take_passed(now_s)):
            return
        known = [handle for handle in passed if handle not in self.compiling]
        self._end_compiling(passed, "timeout", None, now_s)
        if known:
            self._inbox.put(AbortRequests(known, "timeout"))

    def _end_compiling(
        self, handles: Iterable[int], reason: FinishReason, message: str | None, now_s: float
    ) -> None:
        """Accept and end the waiting requests that own any of these samples."""
        waited = self.compiling.abort(handles)
        ended = [(self._sessions.by_client[request.client], request) for request in waited]
        for session, request in ended:
            self._end(session, request)
        for session, request in ended:
            events = [
                Event(handle=one.handle, finish_reason=reason, message=message)
                for one in request.samples
            ]
            self._tell_end(session, request, events, now_s)

    def _tell_end(
        self, session: Session, request: Request, events: list[Event], now_s: float
    ) -> None:
        """Report a request that the step loop never gets: ACCEPTED, then its samples' ends."""
        if self._sessions.has(session):
            self._send(session, _accepted(request), now_s)
        for output in split_events([(request.client, event) for event in events]):
            if self._sessions.has(session):
                self._send_output(session, output, now_s)

    def _start(self, session: Session, added: AddRequest, now_s: float) -> None:
        """Give a request to the step loop, unless its resumed outputs have ended it."""
        request = added.request
        ended = end_by_outputs(request)
        if ended is None:
            self._accept(session, added, now_s)
            return
        self.compiling.leave_queue(request)
        self._end(session, request)
        self._tell_end(session, request, [ended], now_s)

    def _accept(self, session: Session, added: AddRequest, now_s: float) -> None:
        # In this order: that the client is gone may come out when it is told.
        self._inbox.put(added)
        self._send(session, _accepted(added.request), now_s)

    def _refuse(
        self,
        session: Session,
        request_id: str,
        error: EngineOverloadedError | InvalidRequestError,
        now_s: float,
    ) -> None:
        code: ErrorCode = "invalid_request"
        retry_after_s = None
        if isinstance(error, EngineOverloadedError):
            code, retry_after_s = "overloaded", error.retry_after_s
        elif isinstance(error, ContextLengthError):
            code = "context_length_exceeded"
        refusal = Error(
            code=code,
            message=str(error),
            request_id=returned_id(request_id),
            retry_after_s=retry_after_s,
        )
        self._send(session, refusal, now_s)

    def _abort(self, handles: list[int]) -> None:
        if handles:
            self._inbox.put(AbortRequests(handles))

    def _end(self, session: Session, request: Request) -> None:
        for sample in request.samples:
            self._sessions.end_request(session, sample.handle)


def _accepted(request: Request) -> Accepted:
    return Accepted(
        request_id=request.request_id,
        handle=request.handle,
        seed=request.seed,
        not_held=list(request.not_held),
    )
