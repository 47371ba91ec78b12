"""Explanation: why a request waited, what it found cached, who preempted it, and its TTFT in parts.

Each step names the first of the requests it left waiting, and what that one lacked. Requests behind
it wait for the same, unless the one before them came later: then its priority, or its session's
turn, is the reason.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable
from difflib import get_close_matches
from typing import Final

import msgspec

from nanocore.tracing.reader import LostHits, TraceError, TraceReader
from nanocore.tracing.timeline import RequestTimeline, RunTimeline, StepTimes

_MOST_NAMED: Final = 3
PARTS: Final = {
    "compiling": "compiling its structured output",
    "handover": "validation, and the step that was running",
    "waiting": "waiting for its first row",
    "prefill": "in steps that computed its prompt",
    "between_chunks": "with a row, in steps that computed none of its tokens",
    "preempted": "preempted",
    "output": "from its first token to the socket",
}
REASONS: Final = {
    "rows": "all rows were in use (--max-num-seqs)",
    "stage": "the next step was for rows of another pipeline stage",
    "kv_blocks": "not enough free KV blocks",
    "budget": "the token budget was spent (--max-num-batched-tokens)",
    "priority": "requests of higher priority went first",
    "turn": "other sessions were served first, for fairness",
    "sample": "a sibling sample computed the shared prompt",
    "next_step": "waiting for the next step to be planned",
}


class TtftPart(msgspec.Struct):
    """name: a key of PARTS. share: of the TTFT."""

    name: str
    ms: float
    share: float


class Wait(msgspec.Struct):
    """reason: a key of REASONS. num_steps: steps meanwhile that left the request waiting."""

    reason: str
    ms: float
    num_steps: int


class Pause(msgspec.Struct):
    """A preemption. ms: until the request ran again, None if it never did. waits: the reasons."""

    at_s: float
    by: str | None
    ms: float | None
    waits: list[Wait]


class Explanation(msgspec.Struct):
    """Output of `nanocore explain --json`; times are seconds of the run's trace.

    state: "finished", "running" or "waiting" at the end of the trace. num_same_id: requests in the
    file with this id, of which this is the last. ttft_parts sum up to ttft_ms.
    num_draft_tokens: computed drafts; num_accepted_tokens: those that were right.
    """

    request: str
    run: int
    state: str
    session: int | None
    priority: int | None
    prompt_tokens: int | None
    cached_tokens: int
    received_s: float
    admitted_s: float | None
    first_token_s: float | None
    sent_s: float | None
    ended_s: float | None
    ttft_ms: float | None
    ttft_parts: list[TtftPart]
    waits: list[Wait]
    preemptions: list[Pause]
    num_chunks: int
    num_decode_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_same_id: int
    is_shared: bool
    lost: LostHits | msgspec.UnsetType = msgspec.UNSET


def read_runs(reader: TraceReader) -> list[RunTimeline]:
    """Read all runs of a trace; raises TraceError if it is none."""
    runs: list[RunTimeline] = []
    for number, step in reader:
        if number > len(runs):
            runs.append(RunTimeline(number))
        runs[-1].add(step)
    for run in runs:
        run.settle()
    return runs


def explain(path: str, request_id: str) -> Explanation:
    """Explain the last request of a trace with this id, or with one that a server made of it.

    Raises:
        TraceError: the trace cannot be read, or has no such request; names similar ids.
    """
    runs = read_runs(TraceReader(path))
    found = _found(runs, lambda one: one == request_id)
    if not found:
        found = _found(runs, re.compile(_SERVERS.format(re.escape(request_id))).fullmatch)
    if not found:
        raise TraceError(_unknown(path, request_id, runs))
    explanation = explanation_of(*found[-1])
    explanation.num_same_id = len(found)
    return explanation


_SERVERS: Final = "(?:chatcmpl-|cmpl-|msg_|resp_)?{}(?:-[0-9a-f]{{8}})?(?:-[0-9]+)?"
"""A server's ids: kind of response, the client's id, what makes it unique, number of the prompt."""


def _found(
    runs: list[RunTimeline], is_wanted: Callable[[str], object]
) -> list[tuple[RunTimeline, RequestTimeline]]:
    return [
        (run, timeline)
        for run in runs
        for request_id in run.request_ids()
        if is_wanted(request_id)
        for timeline in run.timelines_of(request_id)
    ]


def explanation_of(run: RunTimeline, timeline: RequestTimeline) -> Explanation:
    """Explain one request of a settled run."""
    arrival, ttft_s = timeline.arrival, timeline.ttft_s
    arrived_s = timeline.begin_s if arrival is None else arrival.arrived_s
    stops = (one for one in (timeline.admitted_s, timeline.ended_s, run.end_s) if one is not None)
    return Explanation(
        request=timeline.id,
        run=run.number,
        state=_state(timeline),
        session=None if arrival is None else arrival.session,
        priority=None if arrival is None else arrival.priority,
        prompt_tokens=None if arrival is None else arrival.prompt_tokens,
        cached_tokens=timeline.cached_tokens,
        received_s=timeline.begin_s,
        admitted_s=timeline.admitted_s,
        first_token_s=timeline.first_s,
        sent_s=timeline.sent_s,
        ended_s=timeline.ended_s,
        ttft_ms=None if ttft_s is None else ttft_s * 1e3,
        ttft_parts=ttft_parts(timeline),
        waits=waits(run, timeline, arrived_s, next(stops)),
        preemptions=_pauses(run, timeline),
        num_chunks=len(timeline.chunks),
        num_decode_steps=sum(getattr(one, "num_steps", 0) for one in timeline.work),
        num_draft_tokens=timeline.num_draft_tokens,
        num_accepted_tokens=timeline.num_accepted_tokens,
        num_same_id=1,
        is_shared=timeline.is_shared,
        lost=timeline.lost or msgspec.UNSET,
    )


def _pauses(run: RunTimeline, timeline: RequestTimeline) -> list[Pause]:
    pauses = []
    for one in timeline.preemptions:
        resumed_s, ended_s = one.resumed_s, timeline.ended_s
        stop_s = resumed_s or ended_s or run.end_s
        ms = None if resumed_s is None else (resumed_s - one.at_s) * 1e3
        pauses.append(Pause(one.at_s, one.by, ms, waits(run, timeline, one.at_s, stop_s)))
    return pauses


def _state(timeline: RequestTimeline) -> str:
    if timeline.ended_s is not None:
        return "finished"
    is_paused = bool(timeline.preemptions) and timeline.preemptions[-1].resumed_s is None
    return "waiting" if timeline.admitted_s is None or is_paused else "running"


def _unknown(path: str, request_id: str, runs: list[RunTimeline]) -> str:
    ids = list(dict.fromkeys(one for run in runs for one in run.request_ids()))
    near = get_close_matches(request_id, ids, _MOST_NAMED, cutoff=0.0)
    hint = f"; similar ids: {', '.join(map(repr, near))}" if near else "; it has no requests"
    return f"{path} has no request {request_id!r}{hint}"


def ttft_parts(timeline: RequestTimeline) -> list[TtftPart]:
    """Return the parts in order, without those of no length; none if there is no first token.

    received → compiled → with the scheduler → admitted → computed in chunks → sent
    """
    total_s = timeline.ttft_s
    if total_s is None or timeline.first_s is None:
        return []
    start_s = timeline.begin_s
    stop_s = start_s + total_s
    at_s, seconds = start_s, dict.fromkeys(PARTS, 0.0)

    def until(name: str, mark_s: float | None) -> None:
        nonlocal at_s
        if mark_s is not None and (mark_s := min(mark_s, stop_s)) > at_s:
            seconds[name] += mark_s - at_s
            at_s = mark_s

    if timeline.arrival is not None:
        until("compiling", timeline.arrival.compiled_s)
        until("handover", timeline.arrival.arrived_s)
    until("waiting", timeline.admitted_s)
    for begin_s, end_s, name in _spans(timeline):
        until("between_chunks", min(begin_s, timeline.first_s))
        until(name, min(end_s, timeline.first_s))
    until("between_chunks", timeline.first_s)
    until("output", stop_s)
    return [
        TtftPart(name, ms=took_s * 1e3, share=took_s / total_s if total_s else 0.0)
        for name, took_s in seconds.items()
        if took_s > 0
    ]


def _spans(timeline: RequestTimeline) -> list[tuple[float, float, str]]:
    """Return (begin, end, part) of what happened after the admission, sorted by begin."""
    spans = [(one.begin_s, one.end_s, "prefill") for one in timeline.work]
    spans += [
        (one.at_s, one.resumed_s, "preempted")
        for one in timeline.preemptions
        if one.resumed_s is not None
    ]
    return sorted(spans)


def waits(run: RunTimeline, timeline: RequestTimeline, start_s: float, stop_s: float) -> list[Wait]:
    """Return why a request waited from start to stop, the longest first; they sum up to that time.

    The step that began at start left it waiting or preempted it, the one at stop admitted it.
    """
    found: dict[str, Wait] = {}

    def add(reason: str, seconds: float, num_steps: int) -> None:
        wait = found.setdefault(reason, Wait(reason, 0.0, 0))
        wait.ms += max(0.0, seconds) * 1e3
        wait.num_steps += num_steps

    i = bisect_left(run.steps, start_s, key=lambda step: step.begin_s)
    first_s = run.steps[i].begin_s if i < len(run.steps) else stop_s
    if first_s > start_s:
        add("next_step", min(first_s, stop_s) - start_s, 0)
    while i < len(run.steps) and run.steps[i].begin_s < stop_s:
        step, i = run.steps[i], i + 1
        next_s = run.steps[i].begin_s if i < len(run.steps) else stop_s
        add(_reason(run, timeline, step), min(next_s, stop_s) - step.begin_s, 1)
    return sorted(found.values(), key=lambda wait: -wait.ms)


def _reason(run: RunTimeline, timeline: RequestTimeline, step: StepTimes) -> str:
    if _awaits_leader(run, timeline, step.begin_s):
        return "sample"
    if step.blocked is None:
        return "next_step"
    if step.blocked.id == timeline.id:
        return step.blocked.by
    return _passed_by(run, timeline, step.blocked.id, step.begin_s) or step.blocked.by


def _passed_by(
    run: RunTimeline, timeline: RequestTimeline, head_id: str, at_s: float
) -> str | None:
    """Return why a request that came later goes first; None if it did not come later."""
    mine = timeline.arrival
    for head in reversed(run.timelines_of(head_id)):
        theirs = head.arrival
        if mine is None or theirs is None or theirs.arrived_s > at_s:
            continue
        was_running = head.admitted_s is not None and head.admitted_s < at_s
        if was_running or theirs.arrived_s <= mine.arrived_s:
            return None
        if theirs.priority < mine.priority:
            return "priority"
        return "turn" if theirs.session != mine.session else None
    return None


def _awaits_leader(run: RunTimeline, timeline: RequestTimeline, at_s: float) -> bool:
    if timeline.arrival is None or timeline.arrival.leader is None or timeline.preemptions:
        return False
    for leader in run.timelines_of(timeline.arrival.leader):
        if leader.arrival is None or leader.arrival.received_s != timeline.arrival.received_s:
            continue
        chunks = leader.chunks
        ends = [
            one.begin_s
            for one in chunks
            if one.num_computed + one.num_tokens >= leader.arrival.prompt_tokens
        ]
        done_s = min((one for one in (*ends[:1], leader.ended_s) if one is not None), default=None)
        return done_s is None or at_s < done_s
    return False
