"""What a run's outcomes come to: pure functions, in the definitions of `vllm bench serve`.

Failed requests count as failed and in nothing else. Standard deviations are of the population;
percentiles interpolate linearly. A metric without values is 0 throughout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nanocore.bench.outcome import Outcome


def percentile_name(number: float) -> str:
    """p99, p99.9: as keys and tables have it."""
    return f"p{int(number) if number == int(number) else number}"


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of some values, in their unit. percentiles: by their numbers, such as 99."""

    mean: float
    median: float
    std: float
    percentiles: dict[float, float]

    @classmethod
    def of(cls, values: Sequence[float], percentiles: Sequence[float]) -> Distribution:
        """Of no values: zeros."""
        column = np.asarray(values or [0.0], dtype=np.float64)
        points = np.percentile(column, list(percentiles)).tolist() if percentiles else []
        return cls(
            float(np.mean(column)),
            float(np.median(column)),
            float(np.std(column)),
            dict(zip(percentiles, points, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class Samples:
    """What was measured, in seconds: of each request that succeeded, and `itl` of all its gaps."""

    ttft: list[float]
    tpot: list[float]
    itl: list[float]
    e2el: list[float]
    client_queue_time: list[float]
    e2el_including_client_queue: list[float]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Samples:
        """Of a run."""
        good = succeeded(outcomes)
        return cls(
            ttft=[each.ttft_s for each in good],
            tpot=[tpot_s for each in good if (tpot_s := each.tpot_s) is not None],
            itl=[gap_s for each in good for gap_s in each.itls_s],
            e2el=[each.latency_s for each in good],
            client_queue_time=[each.queue_s for each in good],
            e2el_including_client_queue=[each.latency_s + each.queue_s for each in good],
        )


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts and rates of a run. Rates are per second of its whole duration."""

    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    max_concurrent_requests: int


@dataclass(frozen=True, slots=True)
class Seconds:
    """A run, second by second since its first request that succeeded was sent.

    num_tokens: that came in each. num_requests: that ran at some moment of it.
    """

    num_tokens: list[int]
    num_requests: list[int]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Seconds:
        """Of no success: no seconds."""
        good = succeeded(outcomes)
        if not good:
            return cls([], [])
        start_s = min(each.start_s for each in good)
        length = 1 + int(max(each.end_s for each in good) - start_s)
        num_tokens = np.zeros(length, dtype=np.int64)
        changes = np.zeros(length + 1, dtype=np.int64)
        for each in good:
            seconds = (np.asarray(each.chunk_times_s) - start_s).astype(np.int64)
            np.add.at(num_tokens, seconds, each.chunk_tokens)
            changes[int(each.start_s - start_s)] += 1
            changes[int(each.end_s - start_s) + 1] -= 1
        return cls(num_tokens.tolist(), np.cumsum(changes[:-1]).tolist())


def succeeded(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those that did not fail."""
    return [each for each in outcomes if not each.error]


def totals(
    outcomes: Sequence[Outcome], duration_s: float, goodput_ms: Mapping[str, float]
) -> Totals:
    """Of a run. goodput_ms: the most that `ttft`, `tpot` or `e2el` may be; {} asks for none."""
    good, seconds = succeeded(outcomes), Seconds.of(outcomes)
    num_input = sum(each.num_prompt_tokens for each in good)
    num_output = sum(each.num_output_tokens for each in good)
    num_within = sum(is_within(each, goodput_ms) for each in good)
    return Totals(
        completed=len(good),
        failed=len(outcomes) - len(good),
        total_input_tokens=num_input,
        total_output_tokens=num_output,
        request_throughput=len(good) / duration_s,
        request_goodput=num_within / duration_s if goodput_ms else None,
        output_throughput=num_output / duration_s,
        total_token_throughput=(num_input + num_output) / duration_s,
        max_output_tokens_per_s=float(max(seconds.num_tokens, default=0)),
        max_concurrent_requests=max(seconds.num_requests, default=0),
    )


def is_within(outcome: Outcome, goodput_ms: Mapping[str, float]) -> bool:
    """Whether a request was as fast as all of these ask; one token has a TPOT of 0."""
    measured_s = {
        "ttft": outcome.ttft_s,
        "tpot": outcome.tpot_s or 0.0,
        "e2el": outcome.latency_s,
    }
    return all(measured_s[name] * 1e3 <= most_ms for name, most_ms in goodput_ms.items())
