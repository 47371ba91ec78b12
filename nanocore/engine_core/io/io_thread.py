"""The io thread: owns the socket and the clock; the message handler decides. Never runs a step.

It waits for messages and for the step loop's events, hands them to the message handler in turns,
and ends with the step loop's farewell. Whatever arrives is data: each message is handled inside one
`try`. It also sees when a step hangs: then it tells the clients why, and ends the process.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import Final, NoReturn

from nanocore.engine_core.core import EngineCore
from nanocore.engine_core.io.handshake import PING_INTERVAL_S, SESSION_TIMEOUT_S
from nanocore.engine_core.io.message_handler import MessageHandler
from nanocore.engine_core.log.trace import StepTrace
from nanocore.engine_core.mailbox import Inbox, Outbox, Shutdown
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.protocol.errors import StartError
from nanocore.protocol.metrics import Stats
from nanocore.protocol.sockets.engine_socket import EngineSocket
from nanocore.system.standard_streams import STDERR_FD, can_be_written

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 10.0


def stats_line(before: Stats, now: Stats, passed_s: float) -> str:
    prompts_per_s = (now.prompt_tokens - before.prompt_tokens) / passed_s
    outputs_per_s = (now.generation_tokens - before.generation_tokens) / passed_s
    drafts = ""
    if num_drafts := now.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens:
        num_right = now.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens
        drafts = f", Drafts accepted: {num_right / num_drafts:.1%}"
    return (
        f"Avg prompt throughput: {prompts_per_s:.1f} tokens/s, "
        f"Avg generation throughput: {outputs_per_s:.1f} tokens/s, "
        f"Running: {now.num_requests_running} reqs, Waiting: {now.num_requests_waiting} reqs, "
        f"KV cache usage: {now.kv_cache_usage_perc * 100:.1f}%, "
        f"Prefix cache hit rate: {now.prefix_cache_hit_rate * 100:.1f}%{drafts}"
    )


class StatsLog:
    """Logs throughput and load every ten seconds, in vLLM's words; when idle, one line more.

    read: reads the counters; the step loop is not asked. Times are of one monotonic clock.
    """

    def __init__(self, read: Callable[[], Stats], now_s: float) -> None:
        self._read = read
        self._last, self._last_s = read(), now_s
        self._was_busy = False

    def look(self, now_s: float) -> None:
        """Log the line if it is due and there was work."""
        passed_s = now_s - self._last_s
        if passed_s < INTERVAL_S:
            return
        before, now = self._last, self._read()
        self._last, self._last_s = now, now_s
        is_busy = (
            now.num_requests_running + now.num_requests_waiting > 0
            or now.prompt_tokens != before.prompt_tokens
            or now.generation_tokens != before.generation_tokens
        )
        if is_busy or self._was_busy:
            logger.info("%s", stats_line(before, now, passed_s))
        self._was_busy = is_busy


MAX_TURN_S: Final = 0.001
MAX_REST_S: Final = 0.05  # after a message that took long


class ReceiveThrottle:
    """Limits the time that messages take from steps. Belongs to the io thread.

    Steps run in the same process and need its interpreter. A flood of messages would leave them
    little of it, so a flood gets half of the time at most; the rest waits in its sender's socket.
    Turns are measured in CPU time: waiting for a core or the interpreter costs the steps nothing.

    clock: monotonic, in seconds. cpu_clock: CPU seconds of this thread.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._clock, self._cpu_clock = clock, cpu_clock
        self._start_s = 0.0
        self._rest_until_s = 0.0

    @property
    def rest_s(self) -> float:
        """Seconds until the next turn may begin; at most 0 if it may begin now."""
        return self._rest_until_s - self._clock()

    def begin(self) -> bool:
        """Begin a turn; return False if it is too soon."""
        self._start_s = self._cpu_clock()
        return self._clock() >= self._rest_until_s

    def is_over(self) -> bool:
        """Whether the turn's time is up; a rest as long as the turn follows."""
        length_s = self._cpu_clock() - self._start_s
        if length_s < MAX_TURN_S:
            return False
        self._rest_until_s = self._clock() + min(length_s, MAX_REST_S)
        return True


class Watchdog:
    """Finds a step that hangs. The step loop cannot be asked while its step hangs.

    Looks at the step clock are counted, not its time, so a process that was stopped and continued
    is not blamed. If the io thread cannot look, the `DeadMansSwitch` ends the process some seconds
    later.

    core: the step loop. timeout_s: how long a step may take.
    """

    def __init__(self, core: EngineCore, timeout_s: float) -> None:
        self._core = core
        self._timeout_s = timeout_s
        self._began_s: float | None = None
        self._num_looks = 0

    def look(self) -> str | None:
        """Return what to tell of a step that hangs, or None. Called every PING_INTERVAL_S."""
        # Only a step that was there at the last look has run for the whole time since.
        last_s, self._began_s = self._began_s, self._core.clock.began_s
        is_same = last_s is not None and self._began_s == last_s
        self._num_looks = self._num_looks + 1 if is_same else 0
        if self._num_looks < math.ceil(self._timeout_s / PING_INTERVAL_S):
            return None
        step = self._core.scheduler.counters.num_steps
        return (
            f"step {step} was not done after {self._timeout_s:g} s: {self._core.blame()} "
            "(--step-timeout-s is the limit)"
        )


BACKLOG_RETRY_S: Final = 0.01  # a peer takes some 100 messages at a time


class IoThread(threading.Thread):
    """Serves clients until the step loop says farewell.

    Args:
        socket: bound; the thread takes it over and closes it.
        max_connections: limit of the socket.
        stats_log: logs throughput; None: no log. watchdog: finds a step that hangs.
        clock: monotonic, in seconds. cpu_clock: CPU seconds of the thread.
        trace: notes which outputs are sent.
    """

    def __init__(
        self,
        socket: EngineSocket,
        max_connections: int,
        handler: MessageHandler,
        inbox: Inbox,
        outbox: Outbox,
        stats_log: StatsLog | None = None,
        watchdog: Watchdog | None = None,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
        trace: StepTrace | None = None,
    ) -> None:
        super().__init__(name="io", daemon=True)
        self._socket = socket
        socket.limit(max_connections, SESSION_TIMEOUT_S)
        self._handler = handler
        self._inbox, self._outbox = inbox, outbox
        self._stats_log = stats_log
        self._watchdog = watchdog
        self._clock = clock
        self._trace = trace
        self._throttle = ReceiveThrottle(clock, cpu_clock)

    def run(self) -> None:
        """Serve. A failure ends the engine: it must not live on without hearing clients."""
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
            self._wait(min(next_check_s, self._handler.requests.deadlines.next_s))
            farewell = self._deliver()
            self._receive_batch()
            for routing_id in self._socket.take_gone():
                self._handler.peer_gone(routing_id)
            now_s = self._clock()
            self._handler.flush(now_s)
            self._handler.requests.end_overdue(now_s)
            if now_s >= next_check_s:
                next_check_s = now_s + PING_INTERVAL_S
                self._handler.check_sessions(now_s)
                if self._stats_log is not None:
                    self._stats_log.look(now_s)
                if self._watchdog and (reason := self._watchdog.look()):
                    self._end_process(reason)
        self._say_bye(farewell)

    def _say_bye(self, farewell: Shutdown) -> None:
        self._handler.say_bye(farewell, self._clock())
        self._socket.close()

    def _end_process(self, reason: str) -> NoReturn:
        """Tell clients first: writing the log may take forever, and may hold the interpreter."""
        self._say_bye(Shutdown(reason, failure=True))
        logger.error("%s", reason)
        if can_be_written():
            faulthandler.dump_traceback(STDERR_FD, all_threads=True)
        os._exit(StartError.exit_code)

    def _wait(self, next_check_s: float) -> None:
        """Sleep until there is something to do; during a rest only for the step loop."""
        if (rest_s := self._throttle.rest_s) > 0:
            self._outbox.wait(rest_s)
        else:
            is_slow = bool(self._handler.sessions.slow)
            next_s = min(next_check_s, self._handler.drain.next_look_s)
            wait_s = BACKLOG_RETRY_S if is_slow else max(0.0, next_s - self._clock())
            self._socket.wait(int(wait_s * 1e3) + 1)

    def _deliver(self) -> Shutdown | None:
        """Hand over the events in the outbox; return the farewell if it is among them."""
        farewell = None
        now_s = self._clock()
        for event in self._outbox.drain():
            if isinstance(event, Shutdown):
                farewell = event
            else:
                if self._trace is not None and isinstance(event, ClientOutput):
                    self._trace.sent(event)
                self._handler.deliver(event, now_s)
        return farewell

    def _receive_batch(self) -> None:
        """Receive what has arrived, as much as one turn allows."""
        if not self._throttle.begin():
            return
        while not self._throttle.is_over():
            if (received := self._socket.receive()) is not None:
                self._receive(*received)
            elif not self._socket.is_busy:
                return

    def _receive(self, routing_id: bytes, frames: list[bytes]) -> None:
        """Handle one message. A bug that it meets costs its session."""
        try:
            self._handler.receive(routing_id, frames, self._clock())
        except Exception as error:
            # Without the error's text: it may quote the message.
            where = "".join(traceback.format_tb(error.__traceback__))
            logger.error("a message could not be handled: %s\n%s", type(error).__name__, where)
            self._handler.expel(routing_id, "internal error")
