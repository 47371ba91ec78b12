"""Handles SUBMIT and ABORT, and deadlines.

A request is given to the step loop at its SUBMIT, and its deadline counts from then. One whose
grammar is not known yet waits there. Its SUBMIT is answered with ACCEPTED or an error when the step
loop says what came of the grammar. Until then the request is *unanswered*: its client does not know
its handles, and if it ends, its client gets ACCEPTED first.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final

import msgspec

from nanocore.engine_core.grammars.token_matcher import Compiled
from nanocore.engine_core.io.admission import Admission
from nanocore.engine_core.io.drain import Drain
from nanocore.engine_core.io.session import Session, SessionTable
from nanocore.engine_core.mailbox import AbortRequests, AddRequest, GrammarDone, Inbox
from nanocore.engine_core.requests.readiness import GRAMMAR
from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.protocol.codec import abort_handles, returned_id
from nanocore.protocol.errors import EngineOverloadedError, ErrorCode, InvalidRequestError
from nanocore.protocol.messages import Abort, Accepted, Error, Message, Submit

_MIN_SWEPT: Final = 64
"""Entries of ended requests that are left alone."""


class Deadlines:
    """When samples of requests with a `timeout_s` must end: a heap. Belongs to the io thread.

    Ended samples are skipped when they reach the head, and swept out when they are the majority.
    So the cost per sample is constant, and a deadline in a week holds no memory for a week.

    open_handles: samples that have not ended; read at every call.
    """

    def __init__(self, open_handles: Collection[int]) -> None:
        self._open_handles = open_handles
        self._heap: list[tuple[float, int]] = []

    @property
    def next_s(self) -> float:
        """Time of the next deadline; infinity if there is none."""
        while self._heap and self._heap[0][1] not in self._open_handles:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def add(self, handles: Sequence[int], deadline_s: float) -> None:
        if len(self._heap) > 2 * len(self._open_handles) + _MIN_SWEPT:
            self._heap = [entry for entry in self._heap if entry[1] in self._open_handles]
            heapq.heapify(self._heap)
        for handle in handles:
            heapq.heappush(self._heap, (deadline_s, handle))

    def take_passed(self, now_s: float) -> list[int]:
        """Remove and return the open samples whose deadlines have passed."""
        passed = []
        while self.next_s <= now_s:
            passed.append(heapq.heappop(self._heap)[1])
        return passed


class _Unanswered(msgspec.Struct):
    """A request whose SUBMIT is not answered. withdraw: gives up the compilation.

    handles: of its samples; which of these have ended is the step loop's to say.
    """

    request: Request
    handles: Sequence[int]
    withdraw: Callable[[], None]


class RequestHandler:
    """Handles SUBMIT and ABORT, and ends requests at their deadlines.

    send: sends to a session at a time, which may close it.
    """

    def __init__(
        self,
        sessions: SessionTable,
        inbox: Inbox,
        admission: Admission,
        drain: Drain,
        send: Callable[[Session, Message, float], None],
    ) -> None:
        self.deadlines = Deadlines(sessions.request_ids)
        self._sessions = sessions
        self._inbox = inbox
        self._admission = admission
        self._drain = drain
        self._send = send
        self._num_handles = 0
        self._unanswered: dict[int, _Unanswered] = {}  # by each sample's handle

    def submit(self, session: Session, submit: Submit, now_s: float) -> None:
        if submit.request_id in session.requests:
            text = f"request_id {submit.request_id!r} is in use in this session: choose another"
            code: ErrorCode = "duplicate_request_id"
            self._send(session, Error(code=code, message=text, request_id=submit.request_id), now_s)
            return
        try:
            self._drain.check(now_s)
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
        # The step loop gets it first: it must know the request when the grammar is done, and that
        # the client is gone may come out when it is told.
        self._inbox.put(AddRequest(request))
        if GRAMMAR in request.waits_for:
            self._compile(request, handles)
        else:
            self._send(session, _accepted(request), now_s)

    def answer(self, event: GrammarDone, now_s: float) -> None:
        """Answer the SUBMIT of a request whose grammar is compiled, or was refused."""
        if (taken := self._take_unanswered(event.handle)) is None:
            return  # its session has ended
        session = self._sessions.by_client[taken.request.client]
        if isinstance(event.compiled, Exception):
            for handle in taken.handles:
                self._sessions.end_request(session, handle)
            self._refuse(session, taken.request.request_id, event.compiled, now_s)
        else:
            self._send(session, _accepted(taken.request), now_s)

    def accept_ended(self, session: Session, output: ClientOutput, now_s: float) -> None:
        """Send ACCEPTED of requests that this output ends before their grammars are compiled."""
        for event in output.events if self._unanswered else ():
            if (taken := self._take_unanswered(event.handle)) is not None:
                self._send(session, _accepted(taken.request), now_s)

    def abort(self, session: Session, message: Abort) -> None:
        """End the samples that an ABORT names, as far as they belong to the session and are
        open.
        """
        own = [handle for i in message.request_ids for handle in session.requests.get(i, ())]
        # Nobody was told the handles of an unanswered request: alone they name nothing.
        single = [one for one in abort_handles(message) if one not in self._unanswered]
        named = dict.fromkeys([*own, *single])
        self._abort([handle for handle in named if self._sessions.owns(session, handle)])

    def forget(self, handles: list[int]) -> None:
        """Abort the requests of a closed session. handles: all its samples."""
        for handle in handles:
            self._take_unanswered(handle)
        self._abort(handles)

    def end_overdue(self, now_s: float) -> None:
        """End requests that have passed their deadlines.

        A request that finishes in the same step ends once, as with an abort.
        """
        if passed := self.deadlines.take_passed(now_s):
            self._inbox.put(AbortRequests(passed, "timeout"))

    def _compile(self, request: Request, handles: Sequence[int]) -> None:
        """Have the grammar compiled. Its result goes to the step loop."""
        wanted, output = request.sampling.structured_outputs, request.resumed_tokens
        assert wanted is not None

        def done(compiled: Compiled) -> None:
            self._inbox.put(GrammarDone(request.handle, compiled, time.monotonic()))

        withdraw = self._admission.grammars.compile(wanted, done, request.client, output)
        self._unanswered |= dict.fromkeys(handles, _Unanswered(request, handles, withdraw))

    def _take_unanswered(self, handle: int) -> _Unanswered | None:
        """Remove the unanswered request with this sample, if there is one; return it."""
        if (taken := self._unanswered.get(handle)) is not None:
            taken.withdraw()  # does nothing if it is compiled
            for sample in taken.handles:
                del self._unanswered[sample]
        return taken

    def _refuse(
        self,
        session: Session,
        request_id: str,
        error: EngineOverloadedError | InvalidRequestError,
        now_s: float,
    ) -> None:
        refusal = Error(
            code=error.code,
            message=str(error),
            request_id=returned_id(request_id),
            retry_after_s=error.retry_after_s if isinstance(error, EngineOverloadedError) else None,
        )
        self._send(session, refusal, now_s)

    def _abort(self, handles: list[int]) -> None:
        if handles:
            self._inbox.put(AbortRequests(handles))


def _accepted(request: Request) -> Accepted:
    return Accepted(
        request_id=request.request_id,
        handle=request.handle,
        seed=request.seed,
        not_held=list(request.not_held),
    )
