"""What outcomes come to: by hand, and against numpy."""

from __future__ import annotations

import random
from dataclasses import astuple

import numpy as np
import pytest

from nanocore.bench.outcome import Outcome
from nanocore.bench.statistics import (
    Distribution,
    Samples,
    Seconds,
    is_within,
    percentile_name,
    totals,
)
from tests.bench.outcomes import FAILED, FIRST, SECOND, outcome

ALL = [FIRST, SECOND, FAILED]


def test_the_metrics_of_a_request() -> None:
    assert (FIRST.ttft_s, FIRST.itls_s, FIRST.latency_s) == (0.5, [0.25, 0.5], 1.25)
    assert FIRST.tpot_s == (1.25 - 0.5) / 3
    assert (SECOND.ttft_s, SECOND.itls_s, SECOND.tpot_s) == (1.0, [], None)
    nothing = Outcome(3, 1.0, 1.5)
    assert (nothing.ttft_s, nothing.latency_s, nothing.queue_s) == (0, 0, 0.5)


def test_samples_are_of_requests_that_succeeded() -> None:
    assert Samples.of(ALL) == Samples(
        ttft=[0.5, 1.0],
        tpot=[0.25],
        itl=[0.25, 0.5],
        e2el=[1.25, 1.0],
        client_queue_time=[0, 0],
        e2el_including_client_queue=[1.25, 1.0],
    )


def test_waiting_for_a_turn_is_part_of_the_latency_with_the_queue() -> None:
    late = Outcome(1, arrival_s=1.0, start_s=3.0)
    late.add_tokens(1, 3.5)
    samples = Samples.of([late])
    assert samples.client_queue_time == [2.0]
    assert (samples.e2el, samples.e2el_including_client_queue) == ([0.5], [2.5])


def test_totals_by_hand() -> None:
    found = totals(ALL, 2.0, {"ttft": 600})
    assert found.completed == 2
    assert found.failed == 1
    assert found.total_input_tokens == 30
    assert found.total_output_tokens == 5
    assert found.request_throughput == 1.0
    assert found.request_goodput == 0.5
    assert found.output_throughput == 2.5
    assert found.total_token_throughput == 17.5
    assert found.max_output_tokens_per_s == 3.0  # of the second one, from 101 s on
    assert found.max_concurrent_requests == 2


def test_there_is_no_goodput_unless_asked_for() -> None:
    assert totals(ALL, 2.0, {}).request_goodput is None


@pytest.mark.parametrize(
    ("goodput_ms", "first", "second"),
    [
        ({"ttft": 500}, True, False),
        ({"ttft": 499}, False, False),
        ({"tpot": 250}, True, True),
        ({"tpot": 249}, False, True),
        ({"e2el": 1000}, False, True),
        ({"ttft": 1000, "e2el": 1250}, True, True),
    ],
)
def test_goodput_takes_the_limit_itself(
    goodput_ms: dict[str, float], first: bool, second: bool
) -> None:
    assert (is_within(FIRST, goodput_ms), is_within(SECOND, goodput_ms)) == (first, second)


def test_seconds_count_tokens_and_requests_from_the_first_start() -> None:
    long = outcome(10.0, [(10.5, 1), (13.25, 5)])
    short = outcome(11.75, [(12.25, 2)])
    assert Seconds.of([short, long, FAILED]) == Seconds([1, 0, 2, 5], [1, 2, 2, 1])


def test_nothing_that_succeeded_is_no_seconds_and_no_division_by_zero() -> None:
    assert Seconds.of([FAILED]) == Seconds([], [])
    found = totals([FAILED], 1.0, {"ttft": 1})
    assert astuple(found) == (0, 1, 0, 0, 0, 0, 0, 0, 0, 0)


def test_a_distribution_by_hand() -> None:
    found = Distribution.of([1.0, 2.0, 3.0, 6.0], [0, 50, 75, 100])
    assert (found.mean, found.median) == (3.0, 2.5)
    assert found.std == pytest.approx((14 / 4) ** 0.5)  # of the population
    assert found.percentiles == {0: 1.0, 50: 2.5, 75: 3.75, 100: 6.0}


def test_a_distribution_is_numpys() -> None:
    rng = random.Random(1)
    values = [rng.expovariate(1) for _ in range(999)]
    found = Distribution.of(values, [1, 50, 99, 99.9])
    for number, value in found.percentiles.items():
        assert value == np.percentile(values, number)
    assert (found.mean, found.std) == (np.mean(values), np.std(values))


def test_a_distribution_of_nothing_is_zero() -> None:
    assert Distribution.of([], [99]) == Distribution(0, 0, 0, {99: 0})


def test_percentiles_are_named_as_they_were_asked_for() -> None:
    assert [*map(percentile_name, [50.0, 99.9, 99.999999])] == ["p50", "p99.9", "p99.999999"]
