"""The metrics of an engine: what the step loop has noted, brought into histograms and counters.

Belongs to the io thread, which reads what the step loop writes; each number is whole, and numbers
of one moment may differ by the step that is under way. The step log is emptied often, so that it
stays small whether or not anybody asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TypeVar, get_args

import numpy as np

from nanocore.engine_core.metrics import families
from nanocore.engine_core.metrics.histogram import Histogram
from nanocore.engine_core.metrics.recent import Recent
from nanocore.engine_core.metrics.request_metrics import RequestMetrics
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.engine_core.stats import DeskCounts, completed, stats_of
from nanocore.engine_core.utilisation import Utilisation
from nanocore.protocol.messages import FinishReason
from nanocore.protocol.metrics import Metric, MetricSample, MetricType
from nanocore.protocol.steps import RecentSteps

T = TypeVar("T")


class MetricsCollector:
    """Makes metrics of a scheduler's step log, which it alone reads.

    Args:
        scheduler: whose step log, counters and sizes are read.
        rejections: of requests that might not wait, by the limit.
        utilisation: what steps use of the machine, if it is known.
        cache: labels that describe the KV cache.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        rejections: Mapping[str, int],
        cache: Mapping[str, str],
        utilisation: Utilisation | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._step_log = scheduler.step_log
        self._rejections = rejections
        self._utilisation = utilisation
        self._cache = dict(cache)
        self._help = families.histograms(scheduler.config.max_model_len)
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in self._help.items()}
        self._requests = RequestMetrics(self._histograms)
        self._recent = Recent(scheduler)
        self._cached_tokens = 0

    def fold(self) -> None:
        """Take in what the step loop has noted since the last time."""
        step_log, histograms = self._step_log, self._histograms
        if self._utilisation is not None:
            self._utilisation.fold()
        if steps := _take(step_log.steps):
            histograms["iteration_tokens_total"].observe([step.num_tokens for step in steps])
            self._recent.steps.extend(steps)
        self._fold_intervals()
        if first := _take(step_log.first_tokens):
            seconds, cached = zip(*first, strict=True)
            known = [one for one in seconds if one is not None]
            histograms["time_to_first_token_seconds"].observe(known)
            self._cached_tokens += sum(cached)
        ended = _take(step_log.ended)
        self._requests.observe(ended)
        self._recent.ended.extend(ended)

    def recent_steps(self, after: int, client: int, desk: DeskCounts) -> RecentSteps:
        """The last steps, as of now, with numbers above `after`; as this client may see them."""
        stats = completed(stats_of(self._scheduler, desk.is_paused), desk)
        open_requests = self._scheduler.open_requests()  # first, so that who ends now is in one
        self.fold()
        return self._recent.tell(after, client, open_requests, stats)

    def collect(self, desk: DeskCounts) -> list[Metric]:
        """All metrics, as of now."""
        self.fold()
        return [
            *self._gauges(desk),
            *self._counters(desk),
            *self._labelled(desk),
            *self._steps(),
            *(
                Metric(name, "histogram", self._help[name][0], [one.sample()], one.bounds)
                for name, one in self._histograms.items()
            ),
        ]

    def _fold_intervals(self) -> None:
        taken = _take(self._step_log.intervals)
        alike = [one for one in taken if isinstance(one, tuple)]
        columns = [one for one in taken if not isinstance(one, tuple)]
        histogram = self._histograms["inter_token_latency_seconds"]
        if alike:
            seconds, num_rows = zip(*alike, strict=True)
            histogram.observe(seconds, num_rows)
        if columns:
            histogram.observe(np.concatenate(columns))

    def _gauges(self, desk: DeskCounts) -> list[Metric]:
        scheduler, kv_cache = self._scheduler, self._scheduler.kv_cache
        values = {
            "num_requests_running": scheduler.num_running,
            "num_requests_waiting": scheduler.num_waiting + desk.num_compiling,
            "kv_cache_usage_perc": kv_cache.usage,
            "num_blocks": kv_cache.num_blocks,
            "num_free_blocks": kv_cache.num_free_blocks,
            "num_clients": desk.num_clients,
            "client_backlog_bytes": desk.backlog_bytes,
            "engine_draining": desk.is_draining,
        }
        return [_metric(name, "gauge", families.GAUGES[name], values[name]) for name in values]

    def _counters(self, desk: DeskCounts) -> list[Metric]:
        counters, prefixes = self._scheduler.counters, self._scheduler.kv_cache.stats
        values = {
            "prefix_cache_queries": prefixes.queries,
            "prefix_cache_hits": prefixes.hits,
            "num_preemptions": counters.num_preemptions,
            "prompt_tokens": counters.prompt_tokens + self._cached_tokens,
            "prompt_tokens_cached": self._cached_tokens,
            "generation_tokens": counters.generation_tokens,
            "num_steps": counters.num_steps,
            "num_aborts": counters.num_aborts + desk.num_aborts,
            "num_protocol_errors": desk.num_protocol_errors,
        }
        return [_metric(name, "counter", families.COUNTERS[name], values[name]) for name in values]

    def _labelled(self, desk: DeskCounts) -> list[Metric]:
        ends: dict[str, int] = dict.fromkeys(get_args(FinishReason), 0)
        series: dict[str, dict[tuple[tuple[str, str], ...], float]] = {
            "num_requests_waiting_by_reason": {
                (("reason", "capacity"),): self._scheduler.num_waiting,
                (("reason", "deferred"),): desk.num_compiling,
            },
            "prompt_tokens_by_source": {
                (("source", "local_compute"),): self._scheduler.counters.prompt_tokens,
                (("source", "local_cache_hit"),): self._cached_tokens,
            },
            "prompt_tokens_cached_by_source": {(("source", "device"),): self._cached_tokens},
            "request_success": _by("finished_reason", ends | self._requests.num_by_reason),
            "admission_rejections": _by("reason", self._rejections),
            "sessions_closed": _by("reason", desk.closed),
            "cache_config_info": {tuple(self._cache.items()): 1},
        }
        metrics = []
        for name, samples in series.items():
            kind, text = families.BY_LABEL[name]
            labelled = [MetricSample(value, list(labels)) for labels, value in samples.items()]
            metrics.append(Metric(name, kind, text, labelled))
        return metrics

    def _steps(self) -> list[Metric]:
        """What steps took of the machine, by their kind."""
        if self._utilisation is None:
            return []
        numbers = self._utilisation.totals()
        return [
            Metric(
                name,
                kind,
                text,
                [
                    MetricSample(float(numbers[f"{step}_{key}"]), [("kind", step)])
                    for step in ("decode", "prefill")
                ],
            )
            for name, (kind, key, text) in families.STEPS.items()
        ]


def _take(entries: deque[T]) -> list[T]:
    """All that are there now; others may be appended meanwhile."""
    return [entries.popleft() for _ in range(len(entries))]


def _metric(name: str, kind: MetricType, text: str, value: float) -> Metric:
    return Metric(name, kind, text, [MetricSample(float(value))])


def _by(label: str, values: Mapping[str, int]) -> dict[tuple[tuple[str, str], ...], float]:
    return {((label, key),): count for key, count in values.items()}
