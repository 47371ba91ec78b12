"""The age of the current step, and a switch that ends the process if no thread can.

The step loop writes the clock, other threads read it. A step that hangs in native code may hold the
interpreter's lock, so that no other thread can run: for that case the loop keeps a dead man's
switch armed while it is in steps, which needs no interpreter. It is disarmed while the loop sleeps,
so that an engine that was stopped while idle survives being continued. (One that is stopped in the
middle of a step for longer than the switch waits does not.)
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import struct
import time
from typing import Final

from nanocore.system.standard_streams import STDERR_FD

_REARM_S: Final = 1.0
"""Age at which an armed switch is armed again: arming costs microseconds."""

_SIGEV_THREAD: Final = 2


class DeadMansSwitch:
    """Ends the process with an exit code unless it is armed again or disarmed in time.

    A second before that, every thread's stack is written to stderr. Belongs to the main thread;
    uses SIGALRM. The process can have one.

    Args:
        timeout_s: from arming to the end, at least 2. exit_code: the process's.

    Raises:
        OSError: the system has no timer, or no thread, to give.
    """

    def __init__(self, timeout_s: float, exit_code: int) -> None:
        self._timeout_s = timeout_s
        faulthandler.register(signal.SIGALRM, file=STDERR_FD, all_threads=True)
        self._libc = ctypes.CDLL(None, use_errno=True)
        # A thread that the C library starts when the time is up calls _exit(exit_code). This is
        # sigevent(7) on 64 bits: value, signal, notification, function, attributes, padding.
        function = ctypes.cast(self._libc._exit, ctypes.c_void_p).value
        event = struct.pack("NiiNN32x", exit_code, 0, _SIGEV_THREAD, function, 0)
        self._timer = ctypes.c_void_p()
        if self._libc.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(self._timer)) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def arm(self) -> None:
        """End the process in `timeout_s` from now; replaces an earlier time."""
        self._set(self._timeout_s)
        signal.setitimer(signal.ITIMER_REAL, self._timeout_s - 1)

    def disarm(self) -> None:
        self._set(0.0)
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _set(self, seconds: float) -> None:
        # itimerspec(3): no interval, then seconds and nanoseconds until the time is up.
        spec = struct.pack("4l", 0, 0, int(seconds), int(seconds % 1 * 1e9))
        self._libc.timer_settime(self._timer, 0, spec, None)


class StepClock:
    """Times the step loop's steps. began_s: monotonic start of the current step; None between
    steps. switch: armed in steps, if given.
    """

    def __init__(self, switch: DeadMansSwitch | None = None) -> None:
        self.began_s: float | None = None
        self._switch = switch
        self._armed_s: float | None = None

    def begin(self) -> None:
        """Begin a step: start its clock, and arm the switch if that is due."""
        self.began_s = now_s = time.monotonic()
        if self._switch and (self._armed_s is None or now_s - self._armed_s > _REARM_S):
            self._switch.arm()
            self._armed_s = now_s

    def end(self) -> None:
        """End a step. The switch stays armed, because the next step follows soon."""
        self.began_s = None

    def rest(self) -> None:
        """End a step that failed, and disarm the switch: no step follows for a while."""
        self.began_s = None
        if self._switch and self._armed_s is not None:
            self._switch.disarm()
            self._armed_s = None

    @property
    def age_ms(self) -> int:
        """Milliseconds since the step began; 0 between steps. For any thread."""
        return int(self.age_s * 1e3)

    @property
    def age_s(self) -> float:
        began_s = self.began_s
        return 0.0 if began_s is None else time.monotonic() - began_s
