"""Metrics as they travel in a REPLY: families that say themselves what they are.

Whoever gets them can show them without knowing their names: the types are Prometheus' own.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MetricType = Literal["counter", "gauge", "histogram"]


class MetricSample(msgspec.Struct, frozen=True):
    """One series of a metric.

    labels: [name, value] pairs. value: of a counter or gauge; of a histogram the sum of what was
    observed. counts: of a histogram, observations in each of its buckets alone, the last one beyond
    all bounds.
    """

    value: float
    labels: list[tuple[str, str]] = []
    counts: list[int] = []


class Metric(msgspec.Struct, frozen=True):
    """A metric, since the engine's start.

    name: without a prefix, and a counter's without `_total`. bounds: upper bounds of a histogram's
    buckets, ascending, themselves included.
    """

    name: str
    type: MetricType
    help: str
    samples: list[MetricSample]
    bounds: list[float] = []
