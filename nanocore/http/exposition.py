"""Metrics in Prometheus' text format."""

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
_ENGINE: Final = ("engine", "0")
NOT_NAMING: Final = {"cache_config_info": ("model_name",), "admission_rejections": ("engine",)}
"""Labels that vLLM does not give to these, by metric."""


class MetricsCollector(Collector):
    """For registries of prometheus_client.

    read: the metrics of an engine, as of now. model_name: of the series. namespace: with which
    names begin.
    """

    def __init__(
        self, read: Callable[[], Iterable[Metric]], model_name: str, namespace: str = NAMESPACE
    ) -> None:
        self._read = read
        self._labels = dict([("model_name", model_name), _ENGINE])
        self._namespace = namespace

    def collect(self) -> Iterator[Family]:
        """The metrics, as of now."""
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
            elif metric.type == "counter":
                family = counter = CounterMetricFamily(name, metric.help, labels=labels)
                for sample in metric.samples:
                    counter.add_metric(self._values(ours, sample), sample.value)
            else:
                family = gauge = GaugeMetricFamily(name, metric.help, labels=labels)
                for sample in metric.samples:
                    gauge.add_metric(self._values(ours, sample), sample.value)
            yield family

    def _values(self, ours: list[str], sample: MetricSample) -> list[str]:
        return [self._labels[key] for key in ours] + [value for _, value in sample.labels]


def exposition(metrics: Iterable[Metric], model_name: str, namespace: str = NAMESPACE) -> bytes:
    """These metrics of an engine; names begin with the namespace, `vllm` for vLLM's dashboards."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(MetricsCollector(lambda: metrics, model_name, namespace))
    return generate_latest(registry)


def _buckets(metric: Metric, sample: MetricSample) -> list[tuple[str, float]]:
    """(upper bound, observations up to it), as Prometheus counts them."""
    bounds = [*map(floatToGoString, metric.bounds), "+Inf"]
    return list(zip(bounds, accumulate(sample.counts, initial=None), strict=True))
