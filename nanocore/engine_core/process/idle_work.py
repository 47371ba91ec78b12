"""What a start leaves for later: done in moments in which the engine has no request.

The machine's speed is measured, for the log and the metrics of its use, and structured outputs'
vocabulary is loaded. Either would delay requests if it came before the engine is ready, and the
first ones if it came just after: requests tend to follow each other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

from nanocore.system.large_stack_threads import start_thread

logger = logging.getLogger(__name__)

POLL_S: Final = 0.25
NUM_IDLE_POLLS: Final = 3
"""Consecutive polls that find nothing to do."""


class IdleWork:
    """A thread that does one work after the other, each when the engine has been idle a while.

    Args:
        is_idle: whether the engine has no request; called by the thread.
    """

    def __init__(self, is_idle: Callable[[], bool], works: Sequence[Callable[[], None]]) -> None:
        self._is_idle = is_idle
        self._works = works
        self._is_closed = threading.Event()

    def start(self) -> None:
        start_thread(self._run, "idle-work")

    def close(self) -> None:
        """Begin no further work."""
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
