"""What an engine tells of itself in a REPLY: some counters and gauges, or all its metrics.

Metrics say themselves what they are. Whoever gets them can show them without knowing their names:
the types are Prometheus' own.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from nanocore.protocol.fields import since

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


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start and gauges of now; names are vLLM's where it has them."""

    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage_perc: float
    num_blocks: int
    num_free_blocks: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_preemptions: int
    num_aborts: int
    prompt_tokens: int
    generation_tokens: int
    num_steps: int
    paused: bool
    prefix_cache_hit_rate: Annotated[float, since(1)] = 0.0
    num_clients: int = 0
    num_protocol_errors: int = 0
