"""Takes messages in short turns only, and each full turn is followed by a rest.

Steps run in the same process and need its interpreter. A flood of messages, taken as it comes,
would leave them little of it, and outputs would wait; so a flood gets half of the time at most, and
what is not taken yet waits in its sender's socket. Turns are measured in what the thread computes:
one that was kept waiting for a core or the interpreter took nothing from the steps meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

MAX_TURN_S: Final = 0.001
MAX_REST_S: Final = 0.05  # after a message that took long


class ReceiveThrottle:
    """Says when messages may be taken. Belongs to the io thread.

    clock: monotonic, in seconds. cpu_clock: seconds for which this thread has computed.
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
        """Seconds until the next turn may begin; 0 or less: it may."""
        return self._rest_until_s - self._clock()

    def begin(self) -> bool:
        """Begin a turn; False if it is too soon."""
        self._start_s = self._cpu_clock()
        return self._clock() >= self._rest_until_s

    def is_over(self) -> bool:
        """Whether the turn's time is up; the rest is as long as the turn was."""
        length_s = self._cpu_clock() - self._start_s
        if length_s < MAX_TURN_S:
            return False
        self._rest_until_s = self._clock() + min(length_s, MAX_REST_S)
        return True
