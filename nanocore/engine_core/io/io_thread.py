"""The io thread: owns the socket; decodes, validates, answers and sends. Never runs a step.

Whatever arrives is data: each message is handled inside one `try`, and bytes that are no message
are counted and answered with an ERROR. Requests belong to the session that submitted them, so no
client can touch another's. Sessions end by BYE, by the peer's disappearance, of which the socket
tells, by silence, or by not reading; their requests are then aborted. Answers and log lines quote
little of what a client sent, and there are not more lines for more messages.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from nanocore.engine_core.io.admission import Admission
from nanocore.engine_core.io.client_limit import ClientLimit
from nanocore.engine_core.io.control_desk import ControlDesk
from nanocore.engine_core.io.model_files import ModelFiles
from nanocore.engine_core.io.queue_limit import QueueLimit
from nanocore.engine_core.io.reception import Reception
from nanocore.engine_core.io.session import Backlog, Session, output_frames, over_limit
from nanocore.engine_core.io.turn import Turn
from nanocore.engine_core.mailbox import (
    AbortRequests,
    AddRequest,
    ControlReply,
    Farewell,
    Inbox,
    Outbox,
    OutboxEvent,
    Shutdown,
)
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.protocol.codec import InvalidSubmitError, encode, engine_decoder, returned_id
from nanocore.protocol.errors import (
    ContextLengthError,
    EngineOverloadedError,
    ErrorCode,
    InvalidRequestError,
    ProtocolError,
)
from nanocore.protocol.messages import (
    Abort,
    Accepted,
    Bye,
    Capability,
    Control,
    Error,
    Hello,
    Limits,
    Message,
    ModelCard,
    Ping,
    Pong,
    Submit,
)
from nanocore.protocol.sockets import MAX_FRAME_BYTES, EngineSocket, SendResult

logger = logging.getLogger(__name__)

PING_INTERVAL_S: Final = 1.0
SESSION_TIMEOUT_S: Final = 30.0
BACKLOG_TIMEOUT_S: Final = 30.0
BACKLOG_RETRY_S: Final = 0.01  # a peer takes some 100 messages at a time


class IoThread(threading.Thread):
    """Serves clients until the step loop says farewell.

    Args:
        socket: bound; the thread takes it over and closes it.
        model, capabilities, max_num_seqs, client_limit, queue_limit: announced in WELCOME. files:
            those that the model card names. instance: names this run of the engine.
        admission: builds requests. num_steps, step_age_ms: read the step counter, and for how long
            the step loop has been in a step, for PONG.
    """

    def __init__(
        self,
        socket: EngineSocket,
        inbox: Inbox,
        outbox: Outbox,
        model: ModelCard,
        files: ModelFiles,
        capabilities: list[Capability],
        max_num_seqs: int,
        client_limit: ClientLimit,
        queue_limit: QueueLimit,
        instance: str,
        admission: Admission,
        num_steps: Callable[[], int],
        step_age_ms: Callable[[], int],
    ) -> None:
        super().__init__(name="io", daemon=True)
        self._socket = socket
        socket.limit(client_limit.max_connections, SESSION_TIMEOUT_S)
        self._inbox, self._outbox = inbox, outbox
        self._desk = ControlDesk(inbox, files)
        self._admission = admission
        self._num_steps, self._step_age_ms = num_steps, step_age_ms
        limits = Limits(
            max_frame_bytes=MAX_FRAME_BYTES,
            max_num_seqs=max_num_seqs,
            max_num_queued_reqs=queue_limit.max_num_queued_reqs,
            max_num_queued_tokens=queue_limit.max_num_queued_tokens,
            ping_interval_ms=int(PING_INTERVAL_S * 1e3),
            session_timeout_ms=int(SESSION_TIMEOUT_S * 1e3),
            max_num_clients=client_limit.max_num_clients,
        )
        self._reception = Reception(model, limits, capabilities, instance)
        self._decoder = engine_decoder()
        self._sessions: dict[bytes, Session] = {}
        self._clients: dict[int, Session] = {}
        self._slow: dict[int, Session] = {}  # those with a backlog, by client
        self._request_ids: dict[int, str] = {}  # by handle, of requests that have not ended
        self._num_sessions = 0
        self._num_handles = 0
        self._num_protocol_errors = 0
        self._turn = Turn()
        self._closed: Counter[str] = Counter()  # sessions by reason, since they were last logged

    def run(self) -> None:
        """The thread's body. Its failure is the engine's: a deaf engine must not live on."""
        try:
            self._serve()
        except Exception as error:
            logger.exception("the io thread failed")
            self._inbox.put(Shutdown(f"io thread: {type(error).__name__}: {error}", failure=True))

    def _serve(self) -> None:
        self._socket.watch(self._outbox.fd)
        next_ping_s = time.monotonic() + PING_INTERVAL_S
        farewell = None
        while farewell is None:
            if (rest_s := self._turn.rest_s) > 0:
                self._outbox.wait(rest_s)
            else:
                wait_s = BACKLOG_RETRY_S if self._slow else max(0.0, next_ping_s - time.monotonic())
                self._socket.wait(int(wait_s * 1e3) + 1)
            for event in self._outbox.drain():
                farewell = self._deliver(event) or farewell
            self._receive_batch()
            for routing_id in self._socket.take_gone():
                if (gone := self._sessions.get(routing_id)) is not None:
                    self._close_session(gone, "the client is gone")
            now_s = time.monotonic()
            for session in list(self._slow.values()):
                self._flush(session, now_s)
            if now_s >= next_ping_s:
                next_ping_s = now_s + PING_INTERVAL_S
                self._check_sessions(now_s)
        self._say_bye(farewell)

    def _receive_batch(self) -> None:
        """Take what has arrived; of a flood as much as one turn allows."""
        if not self._turn.begin():
            return
        while not self._turn.is_over():
            if (received := self._socket.receive()) is not None:
                self._receive(*received)
            elif not self._socket.is_busy:
                return

    def _receive(self, routing_id: bytes, frames: list[bytes]) -> None:
        """Handle one message, whatever it is. A bug of ours that it meets costs its session."""
        try:
            self._take(routing_id, frames)
        except Exception as error:
            # Without the error's text: it may quote the message.
            where = "".join(traceback.format_tb(error.__traceback__))
            logger.error("a message could not be handled: %s\n%s", type(error).__name__, where)
            self._socket.send(routing_id, encode(Bye(reason="internal error")))
            if (session := self._sessions.get(routing_id)) is not None:
                self._close_session(session, "internal error")

    def _take(self, routing_id: bytes, frames: list[bytes]) -> None:
        session = self._sessions.get(routing_id)
        try:
            message = self._decoder.decode(frames)
            if session is None:
                self._open_session(routing_id, message)
            else:
                session.last_seen_s = time.monotonic()
                self._handle(session, message)
        except InvalidSubmitError as error:
            # Never another code for an id that is in use: it would end the request that has it.
            is_known = session is not None and error.request_id in session.requests
            code: ErrorCode = "duplicate_request_id" if is_known else "invalid_request"
            self._refuse(routing_id, code, str(error), error.request_id)
        except ProtocolError as error:
            self._num_protocol_errors += 1
            self._refuse(routing_id, error.code, str(error))

    def _open_session(self, routing_id: bytes, message: Message) -> None:
        if isinstance(message, Bye):
            return
        if not isinstance(message, Hello):
            raise ProtocolError(f"{message.op.name} before HELLO, or after BYE", "no_session")
        refused = self._reception.refusal(message, len(self._sessions))
        if refused is not None:
            self._socket.send(routing_id, encode(refused))
            return
        self._socket.admit(routing_id)
        self._num_sessions += 1
        session = Session(routing_id, self._num_sessions, time.monotonic())
        self._sessions[routing_id] = self._clients[session.client] = session
        self._send(session, self._reception.welcome(message, session.session_id))

    def _handle(self, session: Session, message: Message) -> None:
        match message:
            case Submit():
                self._submit(session, message)
            case Abort(request_ids=request_ids):
                open_ids = dict.fromkeys(i for i in request_ids if i in session.requests)
                self._abort([session.requests[request_id] for request_id in open_ids])
            case Ping(nonce=nonce):
                num_steps, age_ms = self._num_steps(), self._step_age_ms()
                self._send(session, Pong(nonce=nonce, num_steps=num_steps, step_age_ms=age_ms))
            case Pong():
                pass  # last_seen_s is all it is for
            case Control():
                if (reply := self._desk.handle(session, message)) is not None:
                    self._send(session, reply)
            case Bye():
                self._close_session(session, "the client said BYE")
            case Hello():
                raise ProtocolError("HELLO in an open session; the session goes on")

    def _submit(self, session: Session, submit: Submit) -> None:
        code: ErrorCode = "invalid_request"
        if submit.request_id in session.requests:
            text = f"request_id {submit.request_id!r} is in use in this session: choose another"
            self._refuse(session.routing_id, "duplicate_request_id", text, submit.request_id)
            return
        try:
            request = self._admission.build(submit, self._num_handles + 1, session.client)
        except EngineOverloadedError as error:
            self._send(
                session,
                Error(
                    code="overloaded",
                    message=str(error),
                    request_id=submit.request_id,
                    retry_after_s=error.retry_after_s,
                ),
            )
            return
        except InvalidRequestError as error:
            if isinstance(error, ContextLengthError):
                code = "context_length_exceeded"
            request_id = returned_id(submit.request_id)
            self._refuse(session.routing_id, code, str(error), request_id)
            return
        self._num_handles = request.handle
        session.requests[submit.request_id] = request.handle
        self._request_ids[request.handle] = submit.request_id
        # In this order: that the client is gone may come out when it is told.
        self._inbox.put(AddRequest(request))
        accepted = Accepted(request_id=submit.request_id, handle=request.handle, seed=request.seed)
        self._send(session, accepted)

    def _deliver(self, event: OutboxEvent) -> Farewell | None:
        """Send what the step loop produced."""
        match event:
            case ClientOutput(client=client):
                session = self._clients.get(client)
                if session is not None:
                    self._send_output(session, event)
            case ControlReply(client, reply):
                if (session := self._clients.get(client)) is not None:
                    session.num_calls -= 1
                    if reply.stats is not None:
                        stats = msgspec.structs.replace(
                            reply.stats,
                            num_clients=len(self._sessions),
                            num_protocol_errors=self._num_protocol_errors,
                        )
                        reply = msgspec.structs.replace(reply, stats=stats)
                    self._send(session, reply)
            case Farewell():
                return event
        return None

    def _send_output(self, session: Session, output: ClientOutput) -> None:
        for event in output.events:
            if event.finish_reason is not None:
                request_id = self._request_ids.pop(event.handle, None)
                if request_id is not None:
                    session.requests.pop(request_id)
        if session.backlog is not None:
            session.backlog.add(output)
        elif self._try_send(session, output_frames(output)) is SendResult.FULL:
            self._hold_back(session).add(output)

    def _send(self, session: Session, message: Message) -> None:
        frames = encode(message)
        if session.backlog is None:
            if self._try_send(session, frames) is not SendResult.FULL:
                return
            self._hold_back(session)
        assert session.backlog is not None
        if session.backlog.add_answer(frames) and (most := over_limit(self._slow.values())):
            self._close_session(most, "the client does not read its answers")

    def _hold_back(self, session: Session) -> Backlog:
        """The client is slow from here on: what is for it waits, and is merged, in the backlog."""
        session.backlog = Backlog(time.monotonic())
        self._slow[session.client] = session
        return session.backlog

    def _try_send(self, session: Session, frames: list[bytes]) -> SendResult:
        result = self._socket.send(session.routing_id, frames)
        if result is SendResult.GONE:
            self._close_session(session, "the client is gone")
        return result

    def _flush(self, session: Session, now_s: float) -> None:
        """Send a slow client what its socket takes now; cut it off if it took nothing for long."""
        backlog = session.backlog
        if backlog is None:
            return
        while (frames := backlog.next()) is not None:
            match self._try_send(session, frames):
                case SendResult.GONE:
                    return
                case SendResult.FULL:
                    if now_s - backlog.since_s > BACKLOG_TIMEOUT_S:
                        self._close_session(session, "the client does not read its outputs")
                    return
                case SendResult.SENT:
                    backlog.drop_next()
                    backlog.since_s = now_s
        session.backlog = None
        del self._slow[session.client]

    def _check_sessions(self, now_s: float) -> None:
        self._log_closed()
        for session in list(self._sessions.values()):
            if now_s - session.last_seen_s > SESSION_TIMEOUT_S:
                self._close_session(session, f"no word from the client for {SESSION_TIMEOUT_S} s")
            else:
                self._send(session, Ping())

    def _refuse(
        self, routing_id: bytes, code: str, message: str, request_id: str | None = None
    ) -> None:
        """Answer with an ERROR. For a peer without a session nothing is kept: it may miss it."""
        error = Error(code=code, message=message, request_id=request_id)
        session = self._sessions.get(routing_id)
        if session is not None:
            self._send(session, error)
        else:
            self._socket.send(routing_id, encode(error))

    def _abort(self, handles: list[int]) -> None:
        if handles:
            self._inbox.put(AbortRequests(handles))

    def _close_session(self, session: Session, reason: str) -> None:
        self._closed[reason] += 1
        if self._sessions.pop(session.routing_id, None) is not None:
            self._socket.dismiss(session.routing_id)
        self._clients.pop(session.client, None)
        self._slow.pop(session.client, None)
        for handle in session.requests.values():
            self._request_ids.pop(handle, None)
        self._abort(list(session.requests.values()))
        self._desk.leave(session)
        session.requests = {}

    def _log_closed(self) -> None:
        """One line for all the sessions that were closed lately, however many."""
        if self._closed:
            reasons = ", ".join(f"{reason} ({n})" for reason, n in self._closed.items())
            logger.info("%d sessions closed: %s", self._closed.total(), reasons)
            self._closed.clear()

    def _say_bye(self, farewell: Farewell) -> None:
        self._log_closed()
        for session in list(self._sessions.values()):
            if farewell.failure:
                self._try_send(session, encode(Error(code="engine_dead", message=farewell.reason)))
            self._try_send(session, encode(Bye(reason=farewell.reason)))
        self._socket.close()
