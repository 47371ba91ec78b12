"""How fast memory can be read right now: what neighbours on a shared host take without showing it.

A turn's figure is the smaller of those before and after it. Turns that are compared should have had
the same memory; where they did not, their ratio says more of the neighbours than of the engines.
"""

from __future__ import annotations

import time
from typing import Final

import torch

LIMIT: Final = 0.15
"""How far apart two turns' rates may be, as a share of the higher, for times to be compared."""
_NUM_VALUES: Final = 1 << 26
_NUM_READS: Final = 6


class ReadCanary:
    """Reads 256 MiB with all of torch's threads, several times; the best counts."""

    def __init__(self, num_values: int = _NUM_VALUES) -> None:
        self._values = torch.ones(num_values)

    def gb_per_s(self) -> float:
        """What was read in a second."""
        best_s = float("inf")
        for _ in range(_NUM_READS):
            start_s = time.perf_counter()
            self._values.sum()
            best_s = min(best_s, time.perf_counter() - start_s)
        return self._values.nbytes / best_s / 1e9


def are_comparable(a_gb_per_s: float, b_gb_per_s: float) -> bool:
    """Whether two turns had about the same memory."""
    return abs(a_gb_per_s - b_gb_per_s) <= LIMIT * max(a_gb_per_s, b_gb_per_s)
