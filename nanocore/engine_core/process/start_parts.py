"""The parts of a start, measured; and what it leaves for moments in which there is no request.

The machine's speed is measured, for the log and the metrics of its use, and structured outputs'
vocabulary is loaded. Either would delay requests if it came before the engine is ready, and the
first ones if it came just after: requests tend to follow each other.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

from nanocore.protocol.errors import memory_errors
from nanocore.system.large_stack_threads import start_thread

logger = logging.getLogger(__name__)


def process_age_s() -> float:
    """Seconds since this process began, the interpreter's own start included."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # after boot; field 22 of proc(5)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


@contextmanager
def start_part(name: str, *given: str) -> Iterator[list[str]]:
    """Measure a part of a start, and log it if there are notes on it: given ones, or its own."""
    notes = list(given)
    start_s = time.monotonic()
    with memory_errors(f"{name}: "):
        yield notes
    if notes:
        logger.info("%s %.2f s: %s", name, time.monotonic() - start_s, ", ".join(notes))


POLL_S: Final = 0.25
NUM_IDLE_POLLS: Final = 12
"""Consecutive polls that find nothing to do."""


class IdleWork:
    """A thread that does one work after the other, each when the engine has been idle a while.

    A context manager, at whose end no further work begins.

    Args:
        is_idle: whether the engine has no request; called by the thread.
    """

    def __init__(self, is_idle: Callable[[], bool], works: Sequence[Callable[[], None]]) -> None:
        self._is_idle = is_idle
        self._works = works
        self._is_closed = threading.Event()

    def __enter__(self) -> Self:
        start_thread(self._run, "idle-work")
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()

    def _run(self) -> None:
        for work in self._works:
            num_idle = 0
            while num_idle < NUM_IDLE_POLLS:
                if self._is_closed.wait(POLL_S):
                    return
                num_idle = num_idle + 1 if self._is_idle() else 0
            try:
                work()
            except Exception:  # the engine serves without it
                logger.exception("an engine's late start failed in part")
