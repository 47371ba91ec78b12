"""How fast sessions end, and so when one more may be opened, where all are taken.

Belongs to the reception, which counts those that it opens; how many have ended follows from how
many there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from nanocore.engine_core.io.outflow import Outflow


class SessionTurnover:
    """clock: monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_opened = 0
        self._outflow = Outflow(1)

    def opened(self) -> None:
        """A session is opened."""
        self._num_opened += 1

    def retry_after_s(self, num_sessions: int) -> float:
        """When one of so many sessions will have ended, as they did lately."""
        num_ended = self._num_opened - num_sessions
        self._outflow.observe(self._clock(), [num_ended], is_empty=not num_sessions)
        return self._outflow.retry_after_s([1])
