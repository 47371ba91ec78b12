"""The engine's metrics in Prometheus' text format: written, and read again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, pairwise
from typing import Final, cast, get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from nanocore.protocol.metrics import Metric, MetricSample, MetricType

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
NAMESPACE: Final = "nanocore"
_OWN_LABELS: Final = ("model_name", "engine")
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


def read_exposition(text: str) -> tuple[list[Metric], str]:
    """Return the metrics of a text, as the engine reported them, and the model's name.

    Raises:
        ValueError: it is not in Prometheus' format.
    """
    metrics, model = [], ""
    for family in text_string_to_metric_families(text):
        _, separator, name = family.name.partition(":")
        if not separator or family.type not in get_args(MetricType):
            continue  # of the process itself
        series: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
        for sample in family.samples:
            model = sample.labels.get("model_name", model)
            labels = tuple(
                label for label in sample.labels.items() if label[0] not in ("le", *_OWN_LABELS)
            )
            series.setdefault(labels, []).append(sample)
        bounds = [
            float(sample.labels["le"])
            for sample in next(iter(series.values()), [])
            if "le" in sample.labels
        ]
        samples = [_series(family.name, [*labels], found) for labels, found in series.items()]
        kind = cast("MetricType", family.type)
        metrics.append(Metric(name, kind, family.documentation, samples, bounds[:-1]))
    return metrics, model


def _series(name: str, labels: list[tuple[str, str]], samples: list[Sample]) -> MetricSample:
    totals = [int(sample.value) for sample in samples if "le" in sample.labels]
    names = name, f"{name}_total", f"{name}_sum"
    value = sum(sample.value for sample in samples if sample.name in names)
    return MetricSample(value, labels, [b - a for a, b in pairwise([0, *totals])])
