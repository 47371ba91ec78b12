"""Summary of a run: load, latencies, reasons of waiting, prefix cache hits."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from nanocore.tracing.timeline import RequestTimeline, RunTimeline

_MOST_SLOW: Final = 5
_SHARES: Final = (0.5, 0.9, 0.99, 1.0)


class Percentiles(msgspec.Struct):
    """Nearest-rank percentiles in ms, and the number of values."""

    num: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float


class SlowRequest(msgspec.Struct):
    request: str
    ttft_ms: float


class RunSummary(msgspec.Struct):
    """busy_s: time with a step in flight. blocked_s: time that the first in line waited, by what it
    lacked. num_hits: requests with cached tokens. num_draft_tokens: computed drafts;
    num_accepted_tokens: those that were right."""

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
    num_draft_tokens: int
    num_accepted_tokens: int
    step: Percentiles | None
    ttft: Percentiles | None
    waiting: Percentiles | None
    blocked_s: dict[str, float]
    slowest: list[SlowRequest]


def summarize(run: RunTimeline) -> RunSummary:
    """Summarize a settled run."""
    requests = run.timelines
    ttfts = [(one.ttft_s, one.id) for one in requests if one.ttft_s is not None]
    slowest = sorted(ttfts, key=lambda one: -one[0])[:_MOST_SLOW]
    return RunSummary(
        run=run.number,
        seconds=run.end_s - run.steps[0].begin_s,
        busy_s=_busy_s(run),
        num_steps=len(run.steps),
        num_tokens=run.total_tokens,
        max_running=run.max_running,
        max_waiting=run.max_waiting,
        max_kv_usage=run.max_kv_usage,
        num_requests=len(requests),
        num_finished=sum(one.ended_s is not None for one in requests),
        num_preemptions=sum(len(one.preemptions) for one in requests),
        num_hits=sum(one.cached_tokens > 0 for one in requests),
        cached_tokens=sum(one.cached_tokens for one in requests),
        prompt_tokens=sum(one.arrival.prompt_tokens for one in requests if one.arrival),
        num_draft_tokens=sum(one.num_draft_tokens for one in requests),
        num_accepted_tokens=sum(one.num_accepted_tokens for one in requests),
        step=percentiles([one.end_s - one.begin_s for one in run.steps]),
        ttft=percentiles([ttft_s for ttft_s, _ in ttfts]),
        waiting=percentiles([one for one in map(_waited_s, requests) if one is not None]),
        blocked_s=_blocked_s(run),
        slowest=[SlowRequest(request_id, ttft_s * 1e3) for ttft_s, request_id in slowest],
    )


def percentiles(seconds: list[float]) -> Percentiles | None:
    if not seconds:
        return None
    seconds = sorted(seconds)
    ranks = [max(1, math.ceil(share * len(seconds))) for share in _SHARES]
    return Percentiles(len(seconds), *(round(seconds[rank - 1] * 1e3, 3) for rank in ranks))


def _waited_s(timeline: RequestTimeline) -> float | None:
    if timeline.arrival is None or timeline.admitted_s is None:
        return None
    return max(0.0, timeline.admitted_s - timeline.arrival.arrived_s)


def _busy_s(run: RunTimeline) -> float:
    busy_s, at_s = 0.0, 0.0
    for step in run.steps:
        busy_s += max(0.0, step.end_s - max(step.begin_s, at_s))
        at_s = max(at_s, step.end_s)
    return busy_s


def _blocked_s(run: RunTimeline) -> dict[str, float]:
    """Add up the time from steps that left a request waiting to the next step."""
    found: dict[str, float] = {}
    for i, step in enumerate(run.steps):
        if step.blocked is not None:
            next_s = run.steps[i + 1].begin_s if i + 1 < len(run.steps) else step.end_s
            by = step.blocked.by
            found[by] = found.get(by, 0.0) + max(0.0, next_s - step.begin_s)
    return dict(sorted(found.items(), key=lambda one: -one[1]))
