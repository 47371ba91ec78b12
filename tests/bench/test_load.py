"""Arrival times, and a run that sends requests. Time is a number that only the test moves."""

from __future__ import annotations

import asyncio
import math
from array import array
from itertools import pairwise

import numpy as np
import pytest

from nanocore.bench.load import (
    BenchRequest,
    Outcome,
    Traffic,
    arrival_times,
    run_load,
)

REQUESTS = [BenchRequest(array("i", [i]), 1, 1) for i in range(4)]


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


class HeldTarget:
    """Holds requests until they are let go. names: in the order in which they came."""

    def __init__(self, clock: Clock, *, is_held: bool = False) -> None:
        self.clock, self.names, self.num_cancelled = clock, list[str](), 0
        self.num_running = self.most_running = 0
        self.gate = asyncio.Event()
        if not is_held:
            self.gate.set()

    async def send(self, request: BenchRequest, request_id: str, arrival_s: float) -> Outcome:
        self.names.append(request_id)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(0)
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        self.num_running -= 1
        return Outcome(request.num_prompt_tokens or 0, arrival_s, self.clock())


def test_requests_are_sent_at_their_times() -> None:
    async def scenario() -> None:
        clock = Clock()
        target = HeldTarget(clock)
        times = [0.0, 0.5, 0.5, 2.0]
        run = await run_load(
            target.send, REQUESTS, times, request_id_prefix="x-", clock=clock, sleep=clock.sleep
        )
        assert clock.slept == [0.5, 1.5]
        assert [outcome.arrival_s - 1000 for outcome in run.outcomes] == times
        assert target.names == ["x-0", "x-1", "x-2", "x-3"]
        assert run.duration_s == 2.0

    asyncio.run(scenario())


@pytest.mark.parametrize(("max_concurrency", "most"), [(None, 4), (1, 1), (3, 3)])
def test_no_more_run_than_are_allowed(max_concurrency: int | None, most: int) -> None:
    async def scenario() -> None:
        clock = Clock()
        target = HeldTarget(clock)
        ended = []
        run = await run_load(
            target.send,
            REQUESTS,
            [0.0] * 4,
            max_concurrency=max_concurrency,
            on_end=lambda: ended.append(1),
            clock=clock,
            sleep=clock.sleep,
        )
        assert target.most_running == most
        assert len(run.outcomes) == len(ended) == 4

    asyncio.run(scenario())


def test_a_cancelled_run_cancels_what_is_in_flight() -> None:
    async def scenario() -> None:
        clock = Clock()
        target = HeldTarget(clock, is_held=True)
        running = asyncio.create_task(run_load(target.send, REQUESTS, [0.0] * 4, clock=clock))
        while target.num_running < 4:
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert target.num_cancelled == 4

    asyncio.run(scenario())


# -- arrival times -------------------------------------------------------------------------------


def test_what_is_infinite_is_all_at_once_or_even() -> None:
    assert arrival_times(3, Traffic(), seed=0) == [0.0] * 3

    times = arrival_times(4, Traffic(2.0, math.inf), seed=3)
    assert times == pytest.approx([0.5, 1.0, 1.5, 2.0])


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0, math.inf])
def test_a_constant_rate_takes_exactly_its_time_whatever_is_drawn(burstiness: float) -> None:
    times = arrival_times(50, Traffic(20.0, burstiness), seed=7)
    assert times[-1] == pytest.approx(2.5)
    assert all(earlier <= later for earlier, later in pairwise([0.0, *times]))


def test_the_seed_decides() -> None:
    traffic = Traffic(5.0)
    assert arrival_times(20, traffic, seed=1) == arrival_times(20, traffic, seed=1)
    assert arrival_times(20, traffic, seed=1) != arrival_times(20, traffic, seed=2)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 9.0])
def test_burstiness_is_the_shape_of_a_gamma_distribution(burstiness: float) -> None:
    """Whose standard deviation is its mean divided by the root of the shape."""
    gaps = np.diff(arrival_times(20_000, Traffic(1.0, burstiness), seed=0))
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)
