"""Drain: the engine finishes open requests, takes no new ones, and then ends.

The message handler shows it each message first, and calls it at intervals. The drain is over when
no request is open and no client has output left to receive, or at the deadline. The step loop is
then told to end, and ends what is left. Paused requests cannot finish and are not waited for. A
drain is never taken back.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Final

from nanocore.engine_core.io.session import Session, SessionTable
from nanocore.engine_core.mailbox import Inbox, Shutdown
from nanocore.protocol.errors import EngineDrainingError, counted
from nanocore.protocol.messages import Control, Draining, Message, Reply

logger = logging.getLogger(__name__)

MIN_RETRY_AFTER_S: Final = 1.0
DRAINING_SINCE: Final = 9
"""The minor version that knows DRAINING."""


class Drain:
    """Drain state of one engine. Times are those of the message handler's clock.

    timeout_s: limit for open requests; 0 ends them at once, with no announcement. send: sends to a
    session at a time, which may close it. is_on: new requests are refused from then on.
    """

    def __init__(
        self,
        sessions: SessionTable,
        inbox: Inbox,
        timeout_s: float,
        send: Callable[[Session, Message, float], None],
    ) -> None:
        self.is_on = False
        self._sessions = sessions
        self._inbox = inbox
        self._timeout_s = timeout_s
        self._send = send
        self._cause = ""
        self._deadline_s = math.inf
        self._is_over = False
        self.next_look_s = math.inf
        """Latest time of the next call of `go_on`."""

    def begin(self, cause: str, now_s: float) -> None:
        """Refuse new requests, and end the engine when open ones have finished. Idempotent.

        cause: what requests that are cut are told, a signal's name, say.
        """
        if self.is_on:
            return
        self.is_on, self._cause = True, cause
        self._deadline_s = self.next_look_s = now_s + self._timeout_s
        self.go_on(now_s)
        if self._is_over:
            return
        logger.info(
            "%s: %s may finish, for at most %g s (--shutdown-timeout); new ones are refused",
            cause,
            counted(len(self._sessions.request_ids), "open request"),
            self._timeout_s,
        )
        for session in list(self._sessions.by_peer.values()):
            if self._sessions.has(session):
                self.tell(session, now_s)

    def go_on(self, now_s: float) -> None:
        """End the engine if no request is left, or the deadline has passed."""
        if not self.is_on or self._is_over:
            return
        num = len(self._sessions.request_ids)
        reason = self._cause
        if self._is_awaited:
            if now_s < self._deadline_s:
                return
            if self._timeout_s:
                reason += f": not done within {self._timeout_s:g} s (--shutdown-timeout)"
        elif num:
            reason += ": the engine is paused, so this request could not come to its end"
        self._is_over, self.next_look_s = True, math.inf
        if num:
            logger.info("the drain ends and aborts %s: %s", counted(num, "request"), reason)
        else:
            logger.info("%s: no requests in flight, exiting", self._cause)
        self._inbox.put(Shutdown(reason))

    def tell(self, session: Session, now_s: float) -> None:
        """Send DRAINING to a session whose protocol version has it, while a drain is on."""
        if self.is_on and not self._is_over and session.minor >= DRAINING_SINCE:
            self._send(session, Draining(deadline_ms=int(self._left_s(now_s) * 1e3)), now_s)

    def handle(self, session: Session, message: Message, now_s: float) -> bool:
        """Handle a message that concerns the drain; return whether it was one."""
        match message:
            case Control(operation="drain"):
                text = f"the engine ends when its requests have, or in {self._left_s(now_s):.0f} s"
                self._send(session, Reply(call_id=message.call_id, message=text), now_s)
                self.begin("drain", now_s)
            case Control(operation="pause") if self.is_on:
                text = "the engine drains: what is paused could not come to its end"
                self._send(session, Reply(call_id=message.call_id, ok=False, message=text), now_s)
            case _:
                return False
        return True

    def check(self, now_s: float) -> None:
        """Raise an EngineDrainingError while a drain is on."""
        if self.is_on:
            raise EngineDrainingError(
                f"this engine is about to end ({self._cause}) and takes no new requests: send it "
                "to another engine, or to the next one at this endpoint",
                # By then this engine is gone; who comes sooner may be refused again. That it has
                # gone before, its BYE says.
                max(MIN_RETRY_AFTER_S, float(math.ceil(self._left_s(now_s)))),
            )

    @property
    def _is_awaited(self) -> bool:
        """Whether a request can still finish, or a client has output left to receive."""
        sessions = self._sessions
        if sessions.slow:
            return True
        is_paused = any(session.has_paused for session in sessions.by_peer.values())
        return bool(sessions.request_ids) and not is_paused

    def _left_s(self, now_s: float) -> float:
        """Seconds until the deadline; the whole timeout before the drain has begun."""
        return max(0.0, self._deadline_s - now_s) if self.is_on else self._timeout_s
