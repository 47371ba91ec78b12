"""Where a request's time to its first token went: parts that follow each other and leave no gap.

received → compiled → handed to the scheduler → admitted → computed, in chunks → handed over
"""

from __future__ import annotations

from typing import Final

import msgspec

from nanocore.tracing.life import Life

PARTS: Final = {
    "compiling": "until its structured output was compiled",
    "handover": "from the io thread, which checks it, to the scheduler",
    "waiting": "waiting for its first row",
    "prefill": "in steps that computed its prompt",
    "between_chunks": "with a row, in steps that computed nothing of it",
    "preempted": "without the row that it had lost",
    "output": "from its first token to the socket",
}


class Part(msgspec.Struct):
    """name: a key of PARTS. share: of the whole."""

    name: str
    ms: float
    share: float


def ttft_parts(life: Life) -> list[Part]:
    """In their order, those that took no time left out. Empty if there is no first token."""
    total_s = life.ttft_s
    if total_s is None or life.first_s is None:
        return []
    start_s = life.begin_s
    stop_s = start_s + total_s
    at_s, seconds = start_s, dict.fromkeys(PARTS, 0.0)

    def until(name: str, mark_s: float | None) -> None:
        nonlocal at_s
        if mark_s is not None and (mark_s := min(mark_s, stop_s)) > at_s:
            seconds[name] += mark_s - at_s
            at_s = mark_s

    if life.arrival is not None:
        until("compiling", life.arrival.compiled_s)
        until("handover", life.arrival.arrived_s)
    until("waiting", life.admitted_s)
    for begin_s, end_s, name in _spans(life):
        until("between_chunks", min(begin_s, life.first_s))
        until(name, min(end_s, life.first_s))
    until("between_chunks", life.first_s)
    until("output", stop_s)
    return [
        Part(name, ms=took_s * 1e3, share=took_s / total_s if total_s else 0.0)
        for name, took_s in seconds.items()
        if took_s > 0
    ]


def _spans(life: Life) -> list[tuple[float, float, str]]:
    """(begin, end, part) of what happened to it once it had been admitted, by begin."""
    spans = [(one.begin_s, one.end_s, "prefill") for one in life.work]
    spans += [
        (one.at_s, one.resumed_s, "preempted")
        for one in life.preemptions
        if one.resumed_s is not None
    ]
    return sorted(spans)
