"""What the engine counts, in Prometheus' text format; names are vLLM's where it has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nanocore.protocol.messages import Stats

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
_GAUGES: Final = {
    "num_requests_running": "Requests that run.",
    "num_requests_waiting": "Requests that wait to run.",
    "kv_cache_usage_perc": "Share of the KV cache's blocks that are in use, 1 is all.",
    "num_blocks": "Blocks of the KV cache.",
    "num_free_blocks": "Blocks of the KV cache that are free.",
    "num_clients": "Sessions with the engine.",
}
_COUNTERS: Final = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found there.",
    "num_preemptions": "Preemptions.",
    "num_aborts": "Requests ended by their clients, or by their time.",
    "prompt_tokens": "Prompt tokens of requests that were accepted.",
    "generation_tokens": "Tokens that were sampled.",
    "num_steps": "Steps.",
    "num_protocol_errors": "Messages that broke the protocol.",
}


class _StatsCollector(Collector):
    def __init__(self, stats: Stats, model_name: str) -> None:
        self._stats = stats
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        for names, family in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
            for name, text in names.items():
                metric = family(f"nanocore:{name}", text, labels=[*self._labels])
                metric.add_metric([*self._labels.values()], getattr(self._stats, name))
                yield metric


def exposition(stats: Stats, model_name: str) -> bytes:
    """All metrics of an engine."""
    registry = CollectorRegistry()
    registry.register(_StatsCollector(stats, model_name))
    return generate_latest(registry)
