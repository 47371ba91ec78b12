"""What an engine tells of its last steps, and of the ways that requests took through them.

Steps travel in columns, one entry a step: names and types once for all of them. Times are seconds
of the engine's own clock, which says `now_s`; they can be compared with one another, and with
nothing else.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec

from nanocore.protocol.fields import Handle, limited
from nanocore.protocol.metrics import Stats

Phase = Literal["queued", "prefill", "decode", "preempted", "ended"]
MAX_MOVES = 64
"""Of a request's way; beyond, those after the first are left out."""


class StepColumns(msgspec.Struct, frozen=True, kw_only=True):
    """Steps, the oldest first.

    number: counts from 1 with the engine's start. ended_s: when its result was in. duration_s: from
    when it was planned, or the step before it ended, whichever is later. num_decode_tokens: of rows
    that go on from their last token. num_running, num_waiting, num_used_blocks: when it ended.
    num_preempted: requests that lost their rows when it was planned.
    """

    number: list[int] = []
    ended_s: list[float] = []
    duration_s: list[float] = []
    num_decode_tokens: list[int] = []
    num_prefill_tokens: list[int] = []
    num_running: list[int] = []
    num_waiting: list[int] = []
    num_used_blocks: list[int] = []
    num_preempted: list[int] = []


class RequestWay(msgspec.Struct, frozen=True, kw_only=True):
    """A request, or one of several samples of it, and when it came into which phase.

    way: [phase, since when] pairs. A phase is a `Phase`, or one of a later version. request_id: its
    client's name for it; empty in another's session. num_cached_tokens: of its prompt, found when
    it was first admitted. num_output_tokens: so far, without those that it came with.
    finish_reason: once it has ended, as `Event` has it.
    """

    handle: Handle
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    way: list[tuple[Annotated[str, limited(enum=get_args(Phase))], float]]
    request_id: str = ""
    finish_reason: str | None = None


class RecentSteps(msgspec.Struct, frozen=True, kw_only=True):
    """The last steps, and requests that are open or have ended lately.

    now_s: by the clock that all times are of. stats: as CONTROL `stats` has them, of this moment.
    """

    now_s: float
    stats: Stats
    steps: StepColumns
    requests: list[RequestWay]
