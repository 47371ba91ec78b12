"""Drain: an engine that is to end finishes what it has, takes nothing new, and then ends.

Belongs to the front desk, which shows it each message first and the time often. It is over when no
request is open and no client has anything left to take in, or at the deadline; the step loop is
then told to end, and ends what is left. What is paused cannot come to its end and is not waited
for. Once begun a drain is never taken back.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Final

from nanocore.engine_core.io.session import Session
from nanocore.engine_core.io.session_table import SessionTable
from nanocore.engine_core.mailbox import Inbox, Shutdown
from nanocore.protocol.codec import returned_id
from nanocore.protocol.errors import ErrorCode
from nanocore.protocol.messages import Control, Draining, Error, Message, Reply, Submit

logger = logging.getLogger(__name__)

MIN_RETRY_AFTER_S: Final = 1.0
DRAINING_SINCE: Final = 9
"""The minor version that knows DRAINING."""


class Drain:
    """One engine's. Times are those of the front desk's clock.

    Args:
        sessions: the open ones. inbox: the step loop's.
        timeout_s: what runs may take so long; 0: it is ended at once, and nobody is told before.
        send: to a session, at a time; it may be closed by that.

    is_on: whether it has begun; new requests are refused from then on.
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

    @property
    def next_look_s(self) -> float:
        """When `go_on` must be called at the latest, if nothing happens before."""
        return math.inf if self._is_over else self._deadline_s

    def begin(self, cause: str, now_s: float) -> None:
        """Refuse new requests, and end the engine when what it has is done. Only the first counts.

        cause: what requests that are cut are told, a signal's name, say.
        """
        if self.is_on:
            return
        self.is_on, self._cause = True, cause
        self._deadline_s = now_s + self._timeout_s
        self.go_on(now_s)
        if self._is_over:
            return
        logger.info(
            "%s: %d requests that run or wait may come to their end, for at most %g s "
            "(--shutdown-timeout); new ones are refused",
            cause,
            len(self._sessions.request_ids),
            self._timeout_s,
        )
        for session in list(self._sessions.by_peer.values()):
            if self._sessions.has(session):
                self.tell(session, now_s)

    def go_on(self, now_s: float) -> None:
        """End the engine if the time has come."""
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
        self._is_over = True
        if num:
            logger.info("the drain ends, and %d requests with it: %s", num, reason)
        else:
            logger.info("%s: nothing is left to be done", self._cause)
        self._inbox.put(Shutdown(reason))

    def tell(self, session: Session, now_s: float) -> None:
        """Say DRAINING to a session, if it knows the word and there is a drain to tell of."""
        if self.is_on and not self._is_over and session.minor >= DRAINING_SINCE:
            self._send(session, Draining(deadline_ms=int(self._left_s(now_s) * 1e3)), now_s)

    def handle(self, session: Session, message: Message, now_s: float) -> bool:
        """Answer a message whose answer is a drain's; whether it was one."""
        match message:
            case Control(operation="drain"):
                text = f"the engine ends when its requests have, or in {self._left_s(now_s):.0f} s"
                self._send(session, Reply(call_id=message.call_id, message=text), now_s)
                self.begin("drain", now_s)
            case Control(operation="pause") if self.is_on:
                text = "the engine drains: what is paused could not come to its end"
                self._send(session, Reply(call_id=message.call_id, ok=False, message=text), now_s)
            # An id that is in use is a duplicate: any other code would end the request that has it.
            case Submit(request_id=request_id) if self.is_on and request_id not in session.requests:
                self._send(session, self._refusal(request_id, now_s), now_s)
            case _:
                return False
        return True

    def _refusal(self, request_id: str, now_s: float) -> Error:
        code: ErrorCode = "draining"
        return Error(
            code=code,
            message=f"this engine is about to end ({self._cause}) and takes no new requests: send "
            "it to another engine, or to the next one at this endpoint",
            request_id=returned_id(request_id),
            # By then this engine is gone; who comes sooner may be refused again. That it has gone
            # before, its BYE says.
            retry_after_s=max(MIN_RETRY_AFTER_S, float(math.ceil(self._left_s(now_s)))),
        )

    @property
    def _is_awaited(self) -> bool:
        """Whether a request can still come to its end, or somebody has yet to take in its own."""
        sessions = self._sessions
        if sessions.slow:
            return True
        is_paused = any(session.has_paused for session in sessions.by_peer.values())
        return bool(sessions.request_ids) and not is_paused

    def _left_s(self, now_s: float) -> float:
        """Until the deadline; of a drain that has not begun all of its time."""
        return max(0.0, self._deadline_s - now_s) if self.is_on else self._timeout_s
