"""The answer of `GET /live`: an engine's last steps, and the ways of requests, as JSON has them.

The engine's columns become an object for each step, which is what pages draw. Ids are those of this
process's own answers; an id that opens a stored answer is kept to who has it.
"""

from __future__ import annotations

from typing import Final

import msgspec

from nanocore.client import RecentSteps, RequestPhases, Stats, StepColumns

_DIGITS: Final = 6
"""Of a second: microseconds."""
_OPENING: Final = "resp_"


class LiveStep(msgspec.Struct, frozen=True):
    """A step. t_s: when it ended. used_blocks, running, waiting: then."""

    step: int
    t_s: float
    duration_s: float
    decode_tokens: int
    prefill_tokens: int
    running: int
    waiting: int
    used_blocks: int
    preempted: int


class LiveRequest(msgspec.Struct, frozen=True):
    """A request, or one of its samples. way: [phase, since when] pairs, the last one "ended"."""

    handle: int
    id: str | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: str | None
    way: list[tuple[str, float]]


class LiveView(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine does now. engine: names its run, by whose clock all times are."""

    engine: str
    model: str
    max_model_len: int
    num_blocks: int
    now_s: float
    draining: bool
    stats: Stats
    steps: list[LiveStep]
    requests: list[LiveRequest]


def live_steps(columns: StepColumns) -> list[LiveStep]:
    """An object for each step."""
    steps = zip(
        columns.number,
        map(_seconds, columns.ended_s),
        map(_seconds, columns.duration_s),
        columns.num_decode_tokens,
        columns.num_prefill_tokens,
        columns.num_running,
        columns.num_waiting,
        columns.num_used_blocks,
        columns.num_preempted,
        strict=True,
    )
    return [LiveStep(*step) for step in steps]


def live_requests(recent: RecentSteps) -> list[LiveRequest]:
    """Those that the engine tells of."""
    return [_live_request(one) for one in recent.requests]


def _live_request(one: RequestPhases) -> LiveRequest:
    is_told = one.request_id and not one.request_id.startswith(_OPENING)
    return LiveRequest(
        one.handle,
        one.request_id if is_told else None,
        one.num_prompt_tokens,
        one.num_cached_tokens,
        one.num_output_tokens,
        one.finish_reason,
        [(phase, _seconds(since_s)) for phase, since_s in one.way],
    )


def _seconds(seconds: float) -> float:
    return round(seconds, _DIGITS)
