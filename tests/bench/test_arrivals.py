"""Arrival times: functions of traffic and seed."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from nanocore.bench.load import Ramp, Traffic, arrival_times, rate_changes

LINEAR = Ramp("linear", 2.0, 10.0)
EXPONENTIAL = Ramp("exponential", 1.0, 16.0)


def test_an_infinite_rate_is_all_at_once() -> None:
    assert arrival_times(3, Traffic(), seed=0) == [0.0] * 3


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0, math.inf])
def test_a_constant_rate_takes_exactly_its_time_whatever_is_drawn(burstiness: float) -> None:
    times = arrival_times(50, Traffic(20.0, burstiness), seed=7)
    assert times[-1] == pytest.approx(2.5)
    assert all(earlier <= later for earlier, later in pairwise([0.0, *times]))


def test_infinite_burstiness_is_even() -> None:
    times = arrival_times(4, Traffic(2.0, math.inf), seed=3)
    assert times == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_the_seed_decides() -> None:
    traffic = Traffic(5.0)
    assert arrival_times(20, traffic, seed=1) == arrival_times(20, traffic, seed=1)
    assert arrival_times(20, traffic, seed=1) != arrival_times(20, traffic, seed=2)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 9.0])
def test_burstiness_is_the_shape_of_a_gamma_distribution(burstiness: float) -> None:
    """Whose standard deviation is its mean divided by the root of the shape."""
    gaps = np.diff(arrival_times(20_000, Traffic(1.0, burstiness), seed=0))
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


def test_ramps_reach_their_ends() -> None:
    assert LINEAR.rates(5) == [2, 4, 6, 8, 10]
    assert EXPONENTIAL.rates(5) == pytest.approx([1, 2, 4, 8, 16])
    assert LINEAR.rates(1) == [2]


def test_the_gaps_of_a_ramp_are_those_of_its_rates() -> None:
    times = arrival_times(5, Traffic(burstiness=math.inf, ramp=EXPONENTIAL), seed=0)
    assert np.diff([0.0, *times]) == pytest.approx([1, 1 / 2, 1 / 4, 1 / 8, 1 / 16])


def test_changes_of_a_ramp_name_each_whole_rate_once() -> None:
    changes = rate_changes([2.0, 2.5, 5.2, 5.9], [0.5, 1.0, 1.5, 2.0])
    assert changes == [(2, 0.0), (3, 1.5), (4, 1.5), (5, 1.5)]
