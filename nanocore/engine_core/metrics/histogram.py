"""A histogram that takes columns of values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from nanocore.protocol.metrics import MetricSample


class Histogram:
    """Counts values by buckets. bounds: their upper bounds, ascending, themselves included."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = [float(bound) for bound in bounds]
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0

    def observe(self, values: ArrayLike, times: ArrayLike | None = None) -> None:
        """Count these values, each once or so many times."""
        column = np.asarray(values, np.float64)
        weights = None if times is None else np.asarray(times, np.float64)
        buckets = np.searchsorted(self.bounds, column, side="left")
        counts = np.bincount(buckets, weights, len(self._counts))
        self._counts += counts.astype(np.int64)
        self._sum += float(column.sum() if weights is None else column @ weights)

    def sample(self) -> MetricSample:
        """What was observed so far."""
        return MetricSample(self._sum, counts=self._counts.tolist())
