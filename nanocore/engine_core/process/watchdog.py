"""Detects a step that hangs, tells the clients why, and ends the process.

A thread of its own, because the step loop cannot be asked while its step hangs. It counts its own
ticks, not the clock's time, so a process that was stopped and continued is not blamed. If the
watchdog cannot run either, the `DeadMansSwitch` ends the process some seconds later.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import threading
from typing import Final

from nanocore.engine_core.core import EngineCore
from nanocore.engine_core.mailbox import Farewell, Outbox
from nanocore.protocol.errors import StartError
from nanocore.system.standard_streams import STDERR_FD, can_be_written

logger = logging.getLogger(__name__)

GRACE_S: Final = 10.0
"""Time for the io thread to tell all clients."""
_MAX_TICK_S: Final = 2.0


class Watchdog(threading.Thread):
    """Watches one step loop, from `start` to `stop`.

    Args:
        core: the step loop. timeout_s: how long a step may take. outbox, io_thread: by which
        clients are told.
    """

    def __init__(
        self,
        core: EngineCore,
        timeout_s: float,
        outbox: Outbox,
        io_thread: threading.Thread,
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._core = core
        self._timeout_s = timeout_s
        self._outbox = outbox
        self._io_thread = io_thread
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End the thread, after the step loop has ended. Called by the step loop's thread.

        Waits for ours: it holds the core, whose tensors must not be freed by a thread that the
        interpreter no longer waits for.
        """
        self._stopped.set()
        self._core.clock.rest()
        self.join(GRACE_S)

    def run(self) -> None:
        """Watch the step clock, and end the process when a step hangs."""
        tick_s = min(self._timeout_s / 4, _MAX_TICK_S)
        max_ticks = math.ceil(self._timeout_s / tick_s)
        began_s: float | None = None
        num_ticks = 0
        while not self._stopped.wait(tick_s):
            # Only a step that was there at the last tick has run for the whole of this one.
            last_s, began_s = began_s, self._core.clock.began_s
            if began_s is None or began_s != last_s:
                num_ticks = 0
                continue
            num_ticks += 1
            if num_ticks >= max_ticks:
                self._end_process()

    def _end_process(self) -> None:
        """Tell clients first: writing the log may take forever, and may hold the interpreter."""
        step = self._core.scheduler.counters.num_steps
        reason = (
            f"step {step} was not done after {self._timeout_s:g} s: {self._core.blame()} "
            "(--step-timeout-s is the limit)"
        )
        self._outbox.put(Farewell(reason, failure=True))
        self._io_thread.join(GRACE_S)
        logger.error("%s", reason)
        if can_be_written():
            faulthandler.dump_traceback(STDERR_FD, all_threads=True)
        os._exit(StartError.exit_code)
