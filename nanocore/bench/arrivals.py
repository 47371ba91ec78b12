"""When requests arrive: seconds since the run's beginning, a function of the traffic and a seed.

Gaps are drawn from a gamma distribution whose shape is the burstiness: 1 is a Poisson process, less
is burstier, infinity is even. At a constant rate the gaps are scaled so that all of them together
take as long as they should, whatever was drawn, as `vllm bench serve` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

RampStrategy = Literal["linear", "exponential"]


@dataclass(frozen=True, slots=True)
class Ramp:
    """A rate that grows from the first request to the last one, in requests per second."""

    strategy: RampStrategy
    start_rps: float
    end_rps: float

    def rates(self, num_requests: int) -> list[float]:
        """Of each request."""
        progress = [i / max(num_requests - 1, 1) for i in range(num_requests)]
        if self.strategy == "linear":
            return [self.start_rps + (self.end_rps - self.start_rps) * share for share in progress]
        return [self.start_rps * (self.end_rps / self.start_rps) ** share for share in progress]


@dataclass(frozen=True, slots=True)
class Traffic:
    """rate: requests per second, infinity for all at once; not used if there is a ramp."""

    rate: float = math.inf
    burstiness: float = 1.0
    ramp: Ramp | None = None


def arrival_times(num_requests: int, traffic: Traffic, seed: int) -> list[float]:
    """Of each request, in seconds, never decreasing; the same for the same arguments."""
    if traffic.ramp is None:
        if math.isinf(traffic.rate):
            return [0.0] * num_requests
        rates = np.full(num_requests, traffic.rate)
    else:
        rates = np.array(traffic.ramp.rates(num_requests))
    gaps_s = 1.0 / rates
    if not math.isinf(traffic.burstiness):
        rng = np.random.default_rng(seed)
        gaps_s = rng.gamma(traffic.burstiness, gaps_s / traffic.burstiness)
    times_s = np.cumsum(gaps_s)
    if traffic.ramp is None and times_s[-1] > 0:
        times_s *= num_requests / traffic.rate / times_s[-1]
    times: list[float] = times_s.tolist()
    return times


def rate_changes(rates: Sequence[float], times_s: Sequence[float]) -> list[tuple[int, float]]:
    """(whole requests per second, time) of every step up of a ramp, the first one at its start."""
    changes = [(int(rates[0]), 0.0)]
    for rate, time_s in zip(rates, times_s, strict=True):
        changes += [(step, time_s) for step in range(changes[-1][0] + 1, int(rate) + 1)]
    return changes
