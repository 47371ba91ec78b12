"""The front desk's part that knows requests: SUBMIT, ABORT, and what becomes of those that wait.

A request is given to the step loop when it is accepted. One with a structured output that is not
known yet waits here until it is compiled, and keeps the place in line of its SUBMIT: it has its
handles and its arrival from then. Whatever ends it before, the step loop never knew it. A deadline
counts from the SUBMIT, too, wherever the request is by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nanocore.engine_core.io.admission import Admission
from nanocore.engine_core.io.compiling_requests import CompilingRequests
from nanocore.engine_core.io.deadlines import Deadlines
from nanocore.engine_core.io.resumed_outputs import end_by_outputs
from nanocore.engine_core.io.session import Session
from nanocore.engine_core.io.session_table import SessionTable
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


class RequestDesk:
    """Belongs to the front desk.

    Args:
        sessions: the open ones. inbox: the step loop's. admission: builds requests.
        compiling: those that await their grammars. num_steps: reads the step counter.
        send, send_output: to a session, at a time; it may be closed by that.
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
        """Accept or refuse a request, now or when it is compiled."""
        if submit.request_id in session.requests:
            text = f"request_id {submit.request_id!r} is in use in this session: choose another"
            code: ErrorCode = "duplicate_request_id"
            self._send(session, Error(code=code, message=text, request_id=submit.request_id), now_s)
            return
        try:
            if submit.priority < 0 and not session.is_admin:
                raise InvalidRequestError(
                    f"priority={submit.priority}: below 0 it would go before everybody's, which is "
                    "for administrators; take 0 or more"
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
        """Answer the SUBMIT of a request whose grammar is compiled, or cannot be."""
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
        """End what an ABORT names, as far as it is the session's and has not ended."""
        single = abort_handles(message)
        own = [handle for i in message.request_ids for handle in session.requests.get(i, ())]
        self._end_compiling(own, "abort", None, now_s)
        # Nobody was told the handles of one that waits: alone they name nothing.
        named = [
            handle for handle in dict.fromkeys([*own, *single]) if handle not in self.compiling
        ]
        self._abort([handle for handle in named if self._sessions.owns(session, handle)])

    def forget(self, handles: list[int]) -> None:
        """Abort what there is of a closed session. handles: of all its samples."""
        unknown = {
            sample.handle for request in self.compiling.abort(handles) for sample in request.samples
        }
        self._abort([handle for handle in handles if handle not in unknown])

    def end_compiling(self, session: Session, message: str, now_s: float) -> None:
        """End the session's requests that wait to be compiled, as the step loop ends its own."""
        handles = [handle for own in session.requests.values() for handle in own]
        self._end_compiling(handles, "abort", message, now_s)

    def end_overdue(self, now_s: float) -> None:
        """End what has passed its deadline.

        If it ends by itself in the same step, that is decided as with an abort: it ends once.
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
        """Of the requests of these samples, those that wait: they are accepted, and end."""
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
        """Of a request that the step loop does not get: it is accepted, and its samples end."""
        if self._sessions.has(session):
            self._send(session, _accepted(request), now_s)
        for output in split_events([(request.client, event) for event in events]):
            if self._sessions.has(session):
                self._send_output(session, output, now_s)

    def _start(self, session: Session, added: AddRequest, now_s: float) -> None:
        """Give a request to the step loop, unless the outputs that it came with have ended it."""
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
