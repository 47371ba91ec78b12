"""How fast something is let go, and so when there will be room: what a refusal says of time.

The totals of what has left are looked at whenever somebody asks to come in, so it costs nothing
else, no thread and no timer. Their growth per second is an exponential mean, over `HORIZON_S`, of
the times in which there was something to let go. Belongs to the io thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

HORIZON_S: Final = 10.0
MIN_RETRY_S: Final = 0.05
MAX_RETRY_S: Final = 60.0
UNKNOWN_RETRY_S: Final = 1.0
_MIN_INTERVAL_S: Final = 0.01


class Outflow:
    """Of several quantities at once. Times are seconds of any one monotonic clock."""

    def __init__(self, num_quantities: int) -> None:
        self._left = [0.0] * num_quantities  # within the horizon
        self._seconds = 0.0  # likewise
        self._totals: list[float] | None = None  # when last looked at, if something was there
        self._looked_s = -math.inf

    def observe(self, now_s: float, totals: Sequence[float], is_empty: bool) -> None:
        """Look at what has left since the start. is_empty: nothing is there that could leave."""
        elapsed_s = now_s - self._looked_s
        if self._totals is None:
            self._begin(now_s, totals, is_empty)
        elif elapsed_s >= _MIN_INTERVAL_S or is_empty:
            grown = [now - before for now, before in zip(totals, self._totals, strict=True)]
            if not is_empty or self._is_fast(grown[0], elapsed_s):
                kept = math.exp(-elapsed_s / HORIZON_S)
                self._seconds = self._seconds * kept + elapsed_s
                self._left = [n * kept + more for n, more in zip(self._left, grown, strict=True)]
            self._begin(now_s, totals, is_empty)

    def retry_after_s(self, needed: Sequence[float]) -> float:
        """When so much of each will have left, from 0.05 to 60 s.

        With nothing known of how fast that goes, it is 1 s.
        """
        if not self._seconds:
            return UNKNOWN_RETRY_S
        waits_s = [MIN_RETRY_S]
        for quantity, left in zip(needed, self._left, strict=True):
            if quantity > 0:
                waits_s.append(quantity * self._seconds / left if left > 0 else MAX_RETRY_S)
        return round(min(max(waits_s), MAX_RETRY_S), 3)

    def _begin(self, now_s: float, totals: Sequence[float], is_empty: bool) -> None:
        self._totals = None if is_empty else [*totals]
        self._looked_s = now_s

    def _is_fast(self, num_left: float, elapsed_s: float) -> bool:
        """Whether a time that nothing was there for part of says more than is known."""
        if self._seconds:
            return num_left * self._seconds > self._left[0] * elapsed_s
        return 0 < elapsed_s <= UNKNOWN_RETRY_S
