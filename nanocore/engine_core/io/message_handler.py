"""Handles each client's messages, and delivers what the step loop produces.

Belongs to the io thread, which hands it messages, events and the time. It only sends by the socket,
and has no thread or clock of its own, so that tests can play any order of events.
Requests belong to the session that submitted them, so no client can touch another's. Sessions end
by BYE, disconnection, silence, or not reading; their requests are then aborted. Replies and log
lines quote little of what a client sent, and more messages do not cause more log lines.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from nanocore.engine_core.io.admission import Admission
from nanocore.engine_core.io.control_handler import ControlHandler, not_permitted
from nanocore.engine_core.io.drain import Drain
from nanocore.engine_core.io.handshake import SESSION_TIMEOUT_S, max_silent_checks, refusal
from nanocore.engine_core.io.request_handler import RequestHandler
from nanocore.engine_core.io.session import (
    MAX_BACKLOG_BYTES,
    MAX_BACKLOGS_BYTES,
    Session,
    SessionTable,
    output_frames,
)
from nanocore.engine_core.log.metrics import IoCounts, completed
from nanocore.engine_core.mailbox import BeginDrain, ControlReply, GrammarDone, Inbox, Shutdown
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.protocol.codec import InvalidSubmitError, encode, engine_decoder
from nanocore.protocol.errors import ErrorCode, ProtocolError, counted
from nanocore.protocol.messages import (
    PROTOCOL_VERSION,
    Abort,
    Bye,
    Control,
    Error,
    Hello,
    Message,
    Ping,
    Pong,
    Submit,
    Welcome,
)
from nanocore.protocol.sockets.engine_socket import EngineSocket
from nanocore.protocol.sockets.options import SendResult

logger = logging.getLogger(__name__)

MAX_ENTRIES: Final = 1024  # of the event log, that nobody has taken
BACKLOG_TIMEOUT_S: Final = 30.0


class MessageHandler:
    """Serves one engine's clients. Times are seconds of any one monotonic clock.

    Args:
        peers: sends, and knows each peer's role; who receives is the io thread.
        inbox: the step loop's. welcome: a template, see `handshake.welcome`.
        num_steps, step_age_ms: read the step counter and the age of the current step, for PONG.
        shutdown_timeout_s: limit of a drain.
        max_backlogs_bytes: unsent replies and logprobs of all clients together; above it, the
        client with the largest backlog is disconnected.
    """

    def __init__(
        self,
        peers: EngineSocket,
        inbox: Inbox,
        welcome: Welcome,
        admission: Admission,
        controls: ControlHandler,
        num_steps: Callable[[], int],
        step_age_ms: Callable[[], int],
        shutdown_timeout_s: float,
        max_backlogs_bytes: int = MAX_BACKLOGS_BYTES,
    ) -> None:
        self.sessions = SessionTable()
        self._peers = peers
        self._welcome = welcome
        self._controls = controls
        self._num_steps, self._step_age_ms = num_steps, step_age_ms
        self.drain = Drain(self.sessions, inbox, shutdown_timeout_s, self._send)
        self.requests = RequestHandler(self.sessions, inbox, admission, self.drain, self._send)
        self._max_backlogs_bytes = max_backlogs_bytes
        self._decoder = engine_decoder()
        self._num_protocol_errors = 0
        self._closed: Counter[str] = Counter()  # sessions by reason, since they were last logged
        self._num_closed: Counter[str] = Counter()  # since the start

    def receive(self, routing_id: bytes, frames: list[bytes], now_s: float) -> None:
        """Handle one message. Malformed or unexpected messages get an ERROR and are counted.

        Raises:
            Exception: a bug of ours that the message meets; the text may quote the message.
        """
        session = self.sessions.by_peer.get(routing_id)
        try:
            message = self._decoder.decode(frames)
            if session is None:
                self._open_session(routing_id, message, now_s)
            else:
                session.last_seen_s, session.num_silent_checks = now_s, 0
                self._handle(session, message, now_s)
        except InvalidSubmitError as error:
            # Never another code for an id that is in use: it would end the request that has it.
            is_known = session is not None and error.request_id in session.requests
            code: ErrorCode = "duplicate_request_id" if is_known else "invalid_request"
            self._refuse(routing_id, code, str(error), error.request_id, now_s)
        except ProtocolError as error:
            self._num_protocol_errors += 1
            self._refuse(routing_id, error.code, str(error), None, now_s)

    def deliver(
        self, event: ClientOutput | ControlReply | GrammarDone | BeginDrain, now_s: float
    ) -> None:
        """Send what the step loop produced, or answer a SUBMIT whose grammar is compiled."""
        if isinstance(event, BeginDrain):
            self.drain.begin(event.cause, now_s)
            return
        if isinstance(event, GrammarDone):
            self.requests.answer(event, now_s)
            return
        session = self.sessions.by_client.get(event.client)
        if session is None:
            return
        if isinstance(event, ClientOutput):
            self.requests.accept_ended(session, event, now_s)
            if self.sessions.has(session):
                self._send_output(session, event, now_s)
            return
        session.num_calls -= 1
        reply = event.reply
        if reply.stats is not None:
            reply = msgspec.structs.replace(reply, stats=completed(reply.stats, self.counts()))
        self._send(session, reply, now_s)

    def flush(self, now_s: float) -> None:
        """Send slow clients what their sockets take; close sessions that take nothing for long."""
        # Also once a second; sooner, because entries hold requests that have ended in memory.
        self._controls.metrics.fold(MAX_ENTRIES)
        for session in list(self.sessions.slow.values()):
            self._flush(session, now_s)
        self.drain.go_on(now_s)

    def check_sessions(self, now_s: float) -> None:
        """PING every client, close silent sessions, and log recently closed ones."""
        self._log_closed()
        self._controls.metrics.fold()
        for session in list(self.sessions.by_peer.values()):
            session.num_silent_checks += 1
            if now_s - session.last_seen_s > SESSION_TIMEOUT_S:
                self._close(session, f"no word from the client for {SESSION_TIMEOUT_S} s")
            elif session.is_given_up:
                self._close(session, "no word from the client for as long as it asked for")
            else:
                self._send(session, Ping(), now_s)

    def counts(self) -> IoCounts:
        slow = self.sessions.slow.values()
        return IoCounts(
            num_clients=len(self.sessions),
            num_protocol_errors=self._num_protocol_errors,
            backlog_bytes=sum([one.backlog.num_bytes for one in slow if one.backlog]),
            is_draining=self.drain.is_on,
            is_paused=any(one.has_paused for one in self.sessions.by_peer.values()),
            closed=self._num_closed,
        )

    def peer_gone(self, routing_id: bytes, reason: str = "the client is gone") -> None:
        """Close a disconnected peer's session, if it has one, and abort its requests."""
        if (session := self.sessions.by_peer.get(routing_id)) is not None:
            self._close(session, reason)

    def expel(self, routing_id: bytes, reason: str) -> None:
        """Say BYE to a peer and close its session, if it has one."""
        self._peers.send(routing_id, encode(Bye(reason=reason)))
        self.peer_gone(routing_id, reason)

    def say_bye(self, farewell: Shutdown, now_s: float) -> None:
        """Send BYE to every client, after ERROR `engine_dead` if the engine failed."""
        self._log_closed()
        self._controls.metrics.fold()  # the step loop has ended: this is the last of its log
        for session in list(self.sessions.by_peer.values()):
            if farewell.failure:
                self._try_send(session, encode(Error(code="engine_dead", message=farewell.reason)))
            self._try_send(session, encode(Bye(reason=farewell.reason)))

    def _open_session(self, routing_id: bytes, message: Message, now_s: float) -> None:
        if isinstance(message, Bye):
            return
        if not isinstance(message, Hello):
            raise ProtocolError(f"{message.op.name} before HELLO, or after BYE", "no_session")
        refused = refusal(message, self._welcome.limits.max_num_clients, len(self.sessions))
        if refused is not None:
            self._peers.send(routing_id, encode(refused))
            return
        self._peers.admit(routing_id)
        session = self.sessions.open(routing_id, now_s)
        session.is_admin = self._peers.is_admin(routing_id)
        welcome = msgspec.structs.replace(
            self._welcome,
            protocol=min(PROTOCOL_VERSION, message.protocol),
            session=session.session_id,
            role="admin" if session.is_admin else "user",
        )
        session.minor = welcome.protocol[1]
        self._send(session, welcome, now_s)
        if self.sessions.has(session):
            self.drain.tell(session, now_s)

    def _handle(self, session: Session, message: Message, now_s: float) -> None:
        if isinstance(message, Control):
            if (refused := not_permitted(session, message)) is not None:
                self._send(session, refused, now_s)
                return
        if self.drain.handle(session, message, now_s):
            return
        match message:
            case Submit():
                self.requests.submit(session, message, now_s)
            case Abort():
                self.requests.abort(session, message)
            case Ping(nonce=nonce, session_timeout_ms=timeout_ms):
                if timeout_ms is not None:
                    session.max_silent_checks = max_silent_checks(timeout_ms)
                num_steps, age_ms = self._num_steps(), self._step_age_ms()
                pong = Pong(nonce=nonce, num_steps=num_steps, step_age_ms=age_ms)
                self._send(session, pong, now_s)
            case Pong():
                pass  # last_seen_s is all it is for
            case Control():
                if (reply := self._controls.handle(session, message, self.counts)) is not None:
                    self._send(session, reply, now_s)
            case Bye():
                self._close(session, "the client said BYE")
            case Hello():
                raise ProtocolError("HELLO in an open session; the session continues")

    def _send_output(self, session: Session, output: ClientOutput, now_s: float) -> None:
        for event in output.events:
            if event.finish_reason is not None:
                self.sessions.end_request(session, event.handle)
        backlog = session.backlog
        if backlog is not None:
            if backlog.add(output):
                self._close_over_limit()
            return
        messages = output_frames(output)
        for i, frames in enumerate(messages):
            result = self._try_send(session, frames)
            if result is SendResult.SENT:
                continue
            if result is SendResult.FULL:
                backlog = self.sessions.hold_back(session, now_s)
                if i == 0:
                    is_due = backlog.add(output)
                else:
                    is_due = backlog.add_rest(messages[i:], output.num_logprobs_bytes)
                if is_due:
                    self._close_over_limit()
            return

    def _send(self, session: Session, message: Message, now_s: float) -> None:
        frames = encode(message)
        backlog = session.backlog
        if backlog is None:
            if self._try_send(session, frames) is not SendResult.FULL:
                return
            backlog = self.sessions.hold_back(session, now_s)
        if backlog.add_answer(frames):
            self._close_over_limit()

    def _close_over_limit(self) -> None:
        """Close the session with the largest backlog, if it or all are over their limit."""
        backlogs = [one.backlog for one in self.sessions.slow.values() if one.backlog]
        most = max(backlogs, key=lambda one: (one.num_bytes, one.client))
        all_bytes = sum(one.num_bytes for one in backlogs)
        if most.num_bytes >= MAX_BACKLOG_BYTES or all_bytes > self._max_backlogs_bytes:
            has_logprobs = most.logprobs_bytes > most.num_bytes // 2
            what = "log probabilities or embeddings" if has_logprobs else "answers"
            self._close(self.sessions.slow[most.client], f"the client does not read its {what}")

    def _try_send(self, session: Session, frames: list[bytes]) -> SendResult:
        result = self._peers.send(session.routing_id, frames)
        if result is SendResult.GONE:
            self._close(session, "the client is gone")
        return result

    def _flush(self, session: Session, now_s: float) -> None:
        backlog = session.backlog
        if backlog is None:
            return
        while (frames := backlog.next()) is not None:
            match self._try_send(session, frames):
                case SendResult.GONE:
                    return
                case SendResult.FULL:
                    if now_s - backlog.since_s > BACKLOG_TIMEOUT_S:
                        self._close(session, "the client does not read its outputs")
                    return
                case SendResult.SENT:
                    backlog.drop_next()
                    backlog.since_s = now_s
        self.sessions.catch_up(session)

    def _refuse(
        self, routing_id: bytes, code: str, message: str, request_id: str | None, now_s: float
    ) -> None:
        """Send an ERROR. A peer without a session has no backlog, so it may miss the ERROR."""
        error = Error(code=code, message=message, request_id=request_id)
        session = self.sessions.by_peer.get(routing_id)
        if session is not None:
            self._send(session, error, now_s)
        else:
            self._peers.send(routing_id, encode(error))

    def _close(self, session: Session, reason: str) -> None:
        if not self.sessions.has(session):
            return  # it has ended by what was sent just before, to it or to another
        self._closed[reason] += 1
        self._num_closed[reason] += 1
        self._peers.dismiss(session.routing_id)
        self.requests.forget(self.sessions.close(session))
        self._controls.leave(session)

    def _log_closed(self) -> None:
        """Log one line for all sessions that were closed lately."""
        if self._closed:
            reasons = ", ".join(f"{reason} ({n})" for reason, n in self._closed.items())
            logger.info("%s closed: %s", counted(self._closed.total(), "session"), reasons)
            self._closed.clear()
