"""Threads in which llguidance may work: with a stack that its recursion fits in, and a priority.

A grammar of a few thousand rules, each of which names the next, needs more than the usual 8 MiB of
stack, and an overflow ends the process. So every thread that compiles or fills masks is of these.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Final

STACK_BYTES: Final = 256 * 2**20
"""Of address space; memory is used as far as the recursion goes."""
_lock = threading.Lock()
_started: list[threading.Thread] = []


def start_thread(target: Callable[[], None], name: str, niceness: int = 0) -> threading.Thread:
    """Run target in a daemon thread with a large stack.

    niceness: how much less urgent than the process it is, where the system knows such threads.
    """

    def run() -> None:
        if niceness and sys.platform == "linux":
            thread = threading.get_native_id()
            nice = min(os.getpriority(os.PRIO_PROCESS, thread) + niceness, 19)
            os.setpriority(os.PRIO_PROCESS, thread, nice)
        target()

    with _lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name=name, daemon=True)
            thread.start()
            _started[:] = [*(one for one in _started if one.is_alive()), thread]
        finally:
            threading.stack_size(before)
    return thread


def any_alive() -> bool:
    """Whether one of them runs. Native code that then returns to an interpreter which is ending
    takes the process with it, so such a process must not end by itself.
    """
    return any(thread.is_alive() for thread in _started)
