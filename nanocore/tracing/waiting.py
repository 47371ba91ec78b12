"""Why a request waited: its time without a row, split by what kept it there.

Each step names who went first of those it left waiting, and what that one lacked. Whoever is behind
it waits for the same, unless the one before it came later: then its priority, or its session's
turn, is why.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

import msgspec

from nanocore.tracing.life import Life
from nanocore.tracing.run import Run, StepTimes

REASONS: Final = {
    "rows": "every row was taken (--max-num-seqs)",
    "stage": "the next step was for other rows, which are dealt to pipeline stages in turns",
    "kv_blocks": "too few KV blocks were free",
    "budget": "the steps' token budget was spent (--max-num-batched-tokens)",
    "partial_prefills": "no more prompts may be in chunks at once (--max-num-partial-prefills)",
    "priority": "requests of higher priority went first",
    "turn": "it was the turn of other sessions",
    "sample": "another sample computed the prompt that they share",
    "next_step": "until the next step was planned",
    "unknown": "not told by the trace",
}


class Wait(msgspec.Struct):
    """reason: a key of REASONS. num_steps: planned meanwhile that left it waiting."""

    reason: str
    ms: float
    num_steps: int


def waits(run: Run, life: Life, start_s: float, stop_s: float) -> list[Wait]:
    """What kept a request waiting from start to stop; the longest first. The sum is stop - start.

    The step that began at start left it waiting or made it wait, the one at stop admitted it.
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
        add(_reason(run, life, step), min(next_s, stop_s) - step.begin_s, 1)
    return sorted(found.values(), key=lambda wait: -wait.ms)


def _reason(run: Run, life: Life, step: StepTimes) -> str:
    if _awaits_leader(run, life, step.begin_s):
        return "sample"
    if step.blocked is None:
        return "next_step" if run.has_arrivals else "unknown"
    if step.blocked.id == life.id:
        return step.blocked.by
    return _passed_by(run, life, step.blocked.id, step.begin_s) or step.blocked.by


def _passed_by(run: Run, life: Life, head_id: str, at_s: float) -> str | None:
    """Why one that came later goes first; None if it did not, or was preempted."""
    mine = life.arrival
    for head in reversed(run.lives_of(head_id)):
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


def _awaits_leader(run: Run, life: Life, at_s: float) -> bool:
    if life.arrival is None or life.arrival.leader is None or life.preemptions:
        return False
    for leader in run.lives_of(life.arrival.leader):
        if leader.arrival is None or leader.arrival.received_s != life.arrival.received_s:
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
