"""The engine's metrics in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from nanocore.protocol.metrics import Metric, MetricSample

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
NAMESPACE: Final = "nanocore"
NOT_NAMING: Final = {"cache_config_info": ("model_name",), "admission_rejections": ("engine",)}
"""Labels that these metrics do not have, as in vLLM."""


class PrometheusCollector(Collector):
    """Collector for registries of prometheus_client.

    Args:
        read: returns the current metrics of an engine.
        model_name: label of all series.
        namespace: prefix of metric names.
    """

    def __init__(
        self, read: Callable[[], Iterable[Metric]], model_name: str, namespace: str = NAMESPACE
    ) -> None:
        self._read = read
        self._labels = {"model_name": model_name, "engine": "0"}
        self._namespace = namespace

    def collect(self) -> Iterator[Family]:
        for metric in self._read():
            name = f"{self._namespace}:{metric.name}"
            ours = [key for key in self._labels if key not in NOT_NAMING.get(metric.name, ())]
            theirs = [key for key, _ in metric.samples[0].labels] if metric.samples else []
            labels = [*ours, *theirs]
            family: Family
            if metric.type == "histogram":
                family = histogram = HistogramMetricFamily(name, metric.help, labels=labels)
                for sample in metric.samples:
                    values = self._values(ours, sample)
                    histogram.add_metric(values, _buckets(metric, sample), sample.value)
            else:
                kind = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
                family = single = kind(name, metric.help, labels=labels)
                for sample in metric.samples:
                    single.add_metric(self._values(ours, sample), sample.value)
            yield family

    def _values(self, ours: list[str], sample: MetricSample) -> list[str]:
        return [self._labels[key] for key in ours] + [value for _, value in sample.labels]


def exposition(metrics: Iterable[Metric], model_name: str, namespace: str = NAMESPACE) -> bytes:
    """Return metrics as text. namespace: prefix of names; `vllm` fits vLLM's dashboards."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PrometheusCollector(lambda: metrics, model_name, namespace))
    return generate_latest(registry)


def _buckets(metric: Metric, sample: MetricSample) -> list[tuple[str, float]]:
    # Prometheus counts observations up to each bound, the engine those in each bucket.
    bounds = [*map(floatToGoString, metric.bounds), "+Inf"]
    return list(zip(bounds, accumulate(sample.counts, initial=None), strict=True))
