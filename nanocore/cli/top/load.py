"""Load of an engine, computed from two readings of its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec

from nanocore.protocol.metrics import Metric, MetricSample


class MetricsReading:
    """All metrics at one moment. at_s: of a monotonic clock."""

    def __init__(self, metrics: Sequence[Metric], at_s: float) -> None:
        self.at_s = at_s
        self._metrics = {metric.name: metric for metric in metrics}

    def value(self, name: str, **labels: str) -> float:
        """Return a counter or gauge, summed over the series with these labels; 0 without series."""
        wanted = set(labels.items())
        return sum([s.value for s in self._samples(name) if wanted <= set(s.labels)])

    def series(self, name: str) -> dict[str, float]:
        """Return values by their first label."""
        return {sample.labels[0][1]: sample.value for sample in self._samples(name)}

    def is_older_than(self, other: MetricsReading) -> bool:
        """Whether this engine has run fewer steps, which means that it is a new one."""
        return self.value("num_steps") < other.value("num_steps")

    def bounds(self, name: str) -> list[float]:
        return self._metrics[name].bounds if name in self._metrics else []

    def counts(self, name: str) -> list[int]:
        """Return counts of a histogram's buckets, the last of them above all bounds."""
        return next((sample.counts for sample in self._samples(name)), [])

    def _samples(self, name: str) -> Sequence[MetricSample]:
        return self._metrics[name].samples if name in self._metrics else ()


class Quantiles(msgspec.Struct, frozen=True):
    """Seconds; the mean is None without observations.

    p50, p90, p99: estimated from a histogram's buckets; None without observations, or if below the
    first bound, `least`.
    """

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    least: float


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Current values, and rates and means since the last reading.

    Shares are from 0 to 1. prefix_hit_rate: None if no tokens were looked up. decode_mbu,
    prefill_mfu: None without such steps.
    """

    num_running: int
    num_waiting: int
    num_deferred: int
    num_clients: int
    is_draining: bool
    num_blocks: int
    kv_cache_usage: float
    prompt_tokens_per_s: float
    generation_tokens_per_s: float
    steps_per_s: float
    ended_per_s: dict[str, float]
    preemptions_per_s: float
    rejections_per_s: float
    prefix_hit_rate: float | None
    ttft_s: Quantiles
    itl_s: Quantiles
    queue_s: Quantiles
    e2e_s: Quantiles
    decode_mbu: float | None
    prefill_mfu: float | None


def load_between(before: MetricsReading, now: MetricsReading) -> Load:
    """Compute the load from two readings of one engine at different times."""
    seconds = now.at_s - before.at_s

    def rate(name: str, **labels: str) -> float:
        return (now.value(name, **labels) - before.value(name, **labels)) / seconds

    def quantiles(name: str) -> Quantiles:
        old = before.counts(name) or [0] * len(now.counts(name))
        counts = [new - earlier for new, earlier in zip(now.counts(name), old, strict=True)]
        bounds = now.bounds(name)
        num_observed = sum(counts)
        mean = (now.value(name) - before.value(name)) / num_observed if num_observed else None
        p50, p90, p99 = [quantile(bounds, counts, share) for share in (0.5, 0.9, 0.99)]
        return Quantiles(mean, p50, p90, p99, least=bounds[0] if bounds else 0.0)

    def utilisation(kind: str, work: str, most: str) -> float | None:
        busy_s = rate("step_seconds", kind=kind) * now.value(most, kind=kind)
        return rate(work, kind=kind) / busy_s if busy_s else None

    old_ends = before.series("request_success")
    queries = rate("prefix_cache_queries")
    return Load(
        num_running=int(now.value("num_requests_running")),
        num_waiting=int(now.value("num_requests_waiting")),
        num_deferred=int(now.value("num_requests_waiting_by_reason", reason="deferred")),
        num_clients=int(now.value("num_clients")),
        is_draining=bool(now.value("engine_draining")),
        num_blocks=int(now.value("num_blocks")),
        kv_cache_usage=now.value("kv_cache_usage_perc"),
        prompt_tokens_per_s=rate("prompt_tokens"),
        generation_tokens_per_s=rate("generation_tokens"),
        steps_per_s=rate("num_steps"),
        ended_per_s={
            reason: (count - old_ends.get(reason, 0)) / seconds
            for reason, count in now.series("request_success").items()
        },
        preemptions_per_s=rate("num_preemptions"),
        rejections_per_s=rate("admission_rejections"),
        prefix_hit_rate=rate("prefix_cache_hits") / queries if queries else None,
        ttft_s=quantiles("time_to_first_token_seconds"),
        itl_s=quantiles("inter_token_latency_seconds"),
        queue_s=quantiles("request_queue_time_seconds"),
        e2e_s=quantiles("e2e_request_latency_seconds"),
        decode_mbu=utilisation("decode", "step_read_bytes", "machine_bytes_per_second"),
        prefill_mfu=utilisation("prefill", "step_flops", "machine_flops_per_second"),
    )


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Estimate like PromQL's histogram_quantile: linear within a bucket, at most the last bound.

    None in the first bucket, which may be wide. counts: per bucket, not cumulative.
    """
    totals = list(accumulate(counts))
    if not totals or not totals[-1]:
        return None
    rank = share * totals[-1]
    for i, total in enumerate(totals[:-1]):
        if total >= rank and counts[i]:
            if not i:
                return None
            low = bounds[i - 1]
            return low + (bounds[i] - low) * (rank - (total - counts[i])) / counts[i]
    return bounds[-1]
