"""Threads in which llguidance may work: with a stack that its recursion fits in.

A grammar of a few thousand rules, each of which names the next, needs more than the usual 8 MiB of
stack, and an overflow ends the process. So every thread that compiles or fills masks is of these.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Final

STACK_BYTES: Final = 256 * 2**20
"""Reserved address space; memory is used only as deep as the recursion goes."""
_NICENESS: Final = 10
"""Beyond the others' of the process: a tenth of the time, where a thread of theirs wants it."""
_lock = threading.Lock()
_started: list[threading.Thread] = []


def start_thread(target: Callable[[], None], name: str) -> threading.Thread:
    with _lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            _started[:] = [*(one for one in _started if one.is_alive()), thread]
        finally:
            threading.stack_size(before)
    return thread


def give_way(thread: threading.Thread) -> None:
    """Lower a thread's priority for good."""
    assert thread.native_id is not None
    niceness = min(19, os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.setpriority(os.PRIO_PROCESS, thread.native_id, niceness)


def join_threads(timeout_s: float) -> bool:
    """Wait for these threads, for at most timeout_s together; return whether all have ended.

    The process must not end in the ordinary way if one runs: native code that returns to an
    interpreter which is ending crashes the process.
    """
    end_s = time.monotonic() + timeout_s
    for thread in (threads := list(_started)):
        thread.join(max(0.0, end_s - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
