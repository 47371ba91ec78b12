"""The io thread: owns the socket and the time; its front desk decides. Never runs a step.

It waits for messages and for the step loop's events, brings them to the desk in turns, and ends
with the step loop's farewell. Whatever arrives is data: each message is handled inside one `try`.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable
from typing import Final

from nanocore.engine_core.io.front_desk import FrontDesk
from nanocore.engine_core.io.receive_throttle import ReceiveThrottle
from nanocore.engine_core.io.reception import PING_INTERVAL_S, SESSION_TIMEOUT_S
from nanocore.engine_core.io.stats_log import StatsLog
from nanocore.engine_core.mailbox import Farewell, Inbox, Outbox, Shutdown
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.engine_core.step_trace import StepTrace
from nanocore.protocol.sockets import EngineSocket

logger = logging.getLogger(__name__)

BACKLOG_RETRY_S: Final = 0.01  # a peer takes some 100 messages at a time


class IoThread(threading.Thread):
    """Serves clients until the step loop says farewell.

    Args:
        socket: bound; the thread takes it over and closes it. max_connections: to it.
        desk: whose peers are the socket's.
        inbox, outbox: shared with the step loop.
        stats_log: looks once a second whether a line is due; None: there are none.
        clock: monotonic, in seconds. cpu_clock: seconds for which the thread has computed.
        trace: is told which outputs are sent.
    """

    def __init__(
        self,
        socket: EngineSocket,
        max_connections: int,
        desk: FrontDesk,
        inbox: Inbox,
        outbox: Outbox,
        stats_log: StatsLog | None = None,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
        trace: StepTrace | None = None,
    ) -> None:
        super().__init__(name="io", daemon=True)
        self._socket = socket
        socket.limit(max_connections, SESSION_TIMEOUT_S)
        self._desk = desk
        self._inbox, self._outbox = inbox, outbox
        self._stats_log = stats_log
        self._clock = clock
        self._trace = trace
        self._throttle = ReceiveThrottle(clock, cpu_clock)

    def run(self) -> None:
        """The thread's body. Its failure is the engine's: a deaf engine must not live on."""
        try:
            self._serve()
        except Exception as error:
            logger.exception("the io thread failed")
            self._inbox.put(Shutdown(f"io thread: {type(error).__name__}: {error}", failure=True))

    def _serve(self) -> None:
        self._socket.watch(self._outbox.fd)
        next_check_s = self._clock() + PING_INTERVAL_S
        farewell = None
        while farewell is None:
            self._wait(min(next_check_s, self._desk.next_deadline_s))
            farewell = self._deliver()
            self._receive_batch()
            for routing_id in self._socket.take_gone():
                self._desk.peer_gone(routing_id)
            now_s = self._clock()
            self._desk.flush(now_s)
            self._desk.end_overdue(now_s)
            if now_s >= next_check_s:
                next_check_s = now_s + PING_INTERVAL_S
                self._desk.check_sessions(now_s)
                if self._stats_log is not None:
                    self._stats_log.look(now_s)
        self._desk.say_bye(farewell, self._clock())
        self._socket.close()

    def _wait(self, next_check_s: float) -> None:
        """Until there is something to do; during a rest only for the step loop."""
        if (rest_s := self._throttle.rest_s) > 0:
            self._outbox.wait(rest_s)
        else:
            is_slow = bool(self._desk.sessions.slow)
            next_s = min(next_check_s, self._desk.drain.next_look_s)
            wait_s = BACKLOG_RETRY_S if is_slow else max(0.0, next_s - self._clock())
            self._socket.wait(int(wait_s * 1e3) + 1)

    def _deliver(self) -> Farewell | None:
        """Pass on what the step loop, and who compiles, have put into the outbox."""
        farewell = None
        now_s = self._clock()
        for event in self._outbox.drain():
            if isinstance(event, Farewell):
                farewell = event
            else:
                if self._trace is not None and isinstance(event, ClientOutput):
                    self._trace.sent(event)
                self._desk.deliver(event, now_s)
        return farewell

    def _receive_batch(self) -> None:
        """Take what has arrived; of a flood as much as one turn allows."""
        if not self._throttle.begin():
            return
        while not self._throttle.is_over():
            if (received := self._socket.receive()) is not None:
                self._receive(*received)
            elif not self._socket.is_busy:
                return

    def _receive(self, routing_id: bytes, frames: list[bytes]) -> None:
        """Bring one message to the desk. A bug of ours that it meets costs its session."""
        try:
            self._desk.receive(routing_id, frames, self._clock())
        except Exception as error:
            # Without the error's text: it may quote the message.
            where = "".join(traceback.format_tb(error.__traceback__))
            logger.error("a message could not be handled: %s\n%s", type(error).__name__, where)
            self._desk.expel(routing_id, "internal error")
