"""One request explained: why it waited, what it hit, who preempted it, where its TTFT went."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Final

import msgspec

from nanocore.tracing.life import Life
from nanocore.tracing.reader import TraceReader
from nanocore.tracing.run import Run
from nanocore.tracing.step import TraceError
from nanocore.tracing.ttft import Part, ttft_parts
from nanocore.tracing.waiting import Wait, waits

_MOST_NAMED: Final = 3


class Pause(msgspec.Struct):
    """A preemption. ms: until it ran again, None if it never did; waits: why it took so long."""

    at_s: float
    by: str | None
    ms: float | None
    waits: list[Wait]


class Explanation(msgspec.Struct):
    """What programs get; times are seconds of the run's trace.

    state: "finished", "running", or "waiting" when the trace ends. num_same_id: requests of the
    file that bore this id; this is the last. ttft_parts sum to ttft_ms.
    """

    request: str
    run: int
    state: str
    session: int | None
    priority: int | None
    prompt_tokens: int | None
    cached_tokens: int
    cached_from: list[str]
    received_s: float
    admitted_s: float | None
    first_token_s: float | None
    sent_s: float | None
    ended_s: float | None
    ttft_ms: float | None
    ttft_parts: list[Part]
    waits: list[Wait]
    preemptions: list[Pause]
    num_chunks: int
    num_decode_steps: int
    num_same_id: int
    is_shared: bool


def read_runs(path: str) -> list[Run]:
    """All runs of a trace.

    Raises:
        TraceError: it cannot be read, or is none.
    """
    runs: list[Run] = []
    for number, step in TraceReader(path):
        if number > len(runs):
            runs.append(Run(number))
        runs[-1].add(step)
    for run in runs:
        run.settle()
    return runs


def explain(path: str, request_id: str) -> Explanation:
    """The last request of a trace that bore this id.

    Raises:
        TraceError: the trace cannot be read, or there is no such request; names the nearest.
    """
    runs = read_runs(path)
    found = [(run, life) for run in runs for life in run.lives_of(request_id)]
    if not found:
        raise TraceError(_unknown(path, request_id, runs))
    explanation = explanation_of(*found[-1])
    explanation.num_same_id = len(found)
    return explanation


def explanation_of(run: Run, life: Life) -> Explanation:
    """Of one life of a run that is read to its end."""
    arrival, ttft_s = life.arrival, life.ttft_s
    arrived_s = life.begin_s if arrival is None else arrival.arrived_s
    stops = (one for one in (life.admitted_s, life.ended_s, run.end_s) if one is not None)
    return Explanation(
        request=life.id,
        run=run.number,
        state=_state(life),
        session=None if arrival is None else arrival.session,
        priority=None if arrival is None else arrival.priority,
        prompt_tokens=None if arrival is None else arrival.prompt_tokens,
        cached_tokens=life.cached_tokens,
        cached_from=life.cached_from,
        received_s=life.begin_s,
        admitted_s=life.admitted_s,
        first_token_s=life.first_s,
        sent_s=life.sent_s,
        ended_s=life.ended_s,
        ttft_ms=None if ttft_s is None else ttft_s * 1e3,
        ttft_parts=ttft_parts(life),
        waits=waits(run, life, arrived_s, next(stops)),
        preemptions=_pauses(run, life),
        num_chunks=len(life.chunks),
        num_decode_steps=sum(getattr(one, "num_steps", 0) for one in life.work),
        num_same_id=1,
        is_shared=life.is_shared,
    )


def _pauses(run: Run, life: Life) -> list[Pause]:
    pauses = []
    for one in life.preemptions:
        resumed_s, ended_s = one.resumed_s, life.ended_s
        stop_s = resumed_s or ended_s or run.end_s
        ms = None if resumed_s is None else (resumed_s - one.at_s) * 1e3
        pauses.append(Pause(one.at_s, one.by, ms, waits(run, life, one.at_s, stop_s)))
    return pauses


def _state(life: Life) -> str:
    if life.ended_s is not None:
        return "finished"
    is_paused = bool(life.preemptions) and life.preemptions[-1].resumed_s is None
    return "waiting" if life.admitted_s is None or is_paused else "running"


def _unknown(path: str, request_id: str, runs: list[Run]) -> str:
    ids = list(dict.fromkeys(one for run in runs for one in run.request_ids()))
    near = get_close_matches(request_id, ids, _MOST_NAMED, cutoff=0.0)
    hint = f"; the nearest are {', '.join(map(repr, near))}" if near else "; it names none"
    return f"{path} names no request {request_id!r}{hint}"
