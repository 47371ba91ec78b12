"""A trace in numbers: load, latency, why requests waited, what the prefix cache gave."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from nanocore.tracing.life import Life
from nanocore.tracing.run import Run
from nanocore.tracing.step import Step

_MOST_SLOW: Final = 5
_SHARES: Final = (0.5, 0.9, 0.99, 1.0)


class Percentiles(msgspec.Struct):
    """Of so many values, in ms; nearest rank."""

    num: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float


class SlowRequest(msgspec.Struct):
    """One of those with the longest TTFT."""

    request: str
    ttft_ms: float


class RunSummary(msgspec.Struct):
    """One engine's run.

    busy_s: in which a step was in flight. blocked_s: for how long the first in line lacked what.
    num_hits: requests that found something in the prefix cache.
    """

    run: int
    seconds: float
    busy_s: float
    num_steps: int
    num_tokens: int
    max_running: int
    max_waiting: int
    max_kv_usage: float
    num_requests: int
    num_finished: int
    num_preemptions: int
    num_hits: int
    cached_tokens: int
    prompt_tokens: int
    step: Percentiles | None
    ttft: Percentiles | None
    waiting: Percentiles | None
    blocked_s: dict[str, float]
    slowest: list[SlowRequest]


class Tally:
    """Adds up the steps of a run, which the run itself does not keep."""

    def __init__(self) -> None:
        self.num_tokens = self.max_running = self.max_waiting = 0
        self.max_kv_usage = 0.0

    def add(self, step: Step, num_tokens: int) -> None:
        """One more step, and what it computes."""
        self.num_tokens += num_tokens
        self.max_running = max(self.max_running, step.num_running)
        self.max_waiting = max(self.max_waiting, step.num_waiting)
        if step.total_blocks:
            usage = 1 - step.free_blocks / step.total_blocks
            self.max_kv_usage = max(self.max_kv_usage, usage)


def summarize(run: Run, tally: Tally) -> RunSummary:
    """Of a run that is settled."""
    lives = run.lives
    ttfts = [(life.ttft_s, life.id) for life in lives if life.ttft_s is not None]
    slowest = sorted(ttfts, key=lambda one: -one[0])[:_MOST_SLOW]
    return RunSummary(
        run=run.number,
        seconds=run.end_s - run.steps[0].begin_s,
        busy_s=_busy_s(run),
        num_steps=len(run.steps),
        num_tokens=tally.num_tokens,
        max_running=tally.max_running,
        max_waiting=tally.max_waiting,
        max_kv_usage=tally.max_kv_usage,
        num_requests=len(lives),
        num_finished=sum(life.ended_s is not None for life in lives),
        num_preemptions=sum(len(life.preemptions) for life in lives),
        num_hits=sum(life.cached_tokens > 0 for life in lives),
        cached_tokens=sum(life.cached_tokens for life in lives),
        prompt_tokens=sum(life.arrival.prompt_tokens for life in lives if life.arrival),
        step=percentiles([one.end_s - one.begin_s for one in run.steps]),
        ttft=percentiles([ttft_s for ttft_s, _ in ttfts]),
        waiting=percentiles([one for one in map(_waited_s, lives) if one is not None]),
        blocked_s=_blocked_s(run),
        slowest=[SlowRequest(request_id, ttft_s * 1e3) for ttft_s, request_id in slowest],
    )


def percentiles(seconds: list[float]) -> Percentiles | None:
    """None of no values."""
    if not seconds:
        return None
    seconds = sorted(seconds)
    ranks = [max(1, math.ceil(share * len(seconds))) for share in _SHARES]
    return Percentiles(len(seconds), *(round(seconds[rank - 1] * 1e3, 3) for rank in ranks))


def _waited_s(life: Life) -> float | None:
    if life.arrival is None or life.admitted_s is None:
        return None
    return max(0.0, life.admitted_s - life.arrival.arrived_s)


def _busy_s(run: Run) -> float:
    busy_s, at_s = 0.0, 0.0
    for step in run.steps:
        busy_s += max(0.0, step.end_s - max(step.begin_s, at_s))
        at_s = max(at_s, step.end_s)
    return busy_s


def _blocked_s(run: Run) -> dict[str, float]:
    """From a step that left somebody waiting until the next one, by what that one lacked."""
    found: dict[str, float] = {}
    for i, step in enumerate(run.steps):
        if step.blocked is not None:
            next_s = run.steps[i + 1].begin_s if i + 1 < len(run.steps) else step.end_s
            by = step.blocked.by
            found[by] = found.get(by, 0.0) + max(0.0, next_s - step.begin_s)
    return dict(sorted(found.items(), key=lambda one: -one[1]))
