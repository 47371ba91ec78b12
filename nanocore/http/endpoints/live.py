"""GET /live: an engine's last steps and the phases of its requests, which the live page polls.

The engine's columns become an object per step, as the page draws them.
"""

from __future__ import annotations

from typing import Final

import msgspec

from nanocore.client import RequestPhases, Stats, StepColumns
from nanocore.http.exchange import Exchange
from nanocore.http.http_errors import bad_request
from nanocore.protocol.fields import MAX_EXACT_INT

_DIGITS: Final = 6
"""Decimal digits of seconds: microseconds."""
_SECRET_PREFIX: Final = "resp_"
"""Prefix of ids that give access to a stored response, so only its client may know them."""


class LiveStep(msgspec.Struct, frozen=True):
    """A step. t_s: end of the step. used_blocks, running, waiting: at its end."""

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
    """A request, or one of its samples. way: [phase, start] pairs; the last phase is "ended"."""

    handle: int
    id: str | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: str | None
    way: list[tuple[str, float]]


class LiveView(msgspec.Struct, frozen=True, kw_only=True):
    """State of an engine. engine: id of its run, whose clock gives all times."""

    engine: str
    model: str
    max_model_len: int
    num_blocks: int
    now_s: float
    draining: bool
    stats: Stats
    steps: list[LiveStep]
    requests: list[LiveRequest]


async def live(exchange: Exchange) -> None:
    after = _after(exchange.query().get("after", "0"))
    client = exchange.client
    recent = await client.recent_steps(after)
    card = client.model_card
    view = LiveView(
        engine=client.engine_instance,
        model=exchange.model_name,
        max_model_len=card.max_model_len,
        num_blocks=card.num_blocks,
        now_s=recent.now_s,
        draining=client.is_draining or exchange.state.is_draining,
        stats=recent.stats,
        steps=live_steps(recent.steps),
        requests=[live_request(one) for one in recent.requests],
    )
    exchange.reply_headers[b"cache-control"] = b"no-store"
    await exchange.reply_json(view)


def _after(text: str) -> int:
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_EXACT_INT))
    if not is_number or int(text) > MAX_EXACT_INT:
        raise bad_request(
            f"after={text[:40]!r}: the number of the last known step, 0 to 2**53 - 1", "after"
        )
    return int(text)


def live_steps(columns: StepColumns) -> list[LiveStep]:
    steps = zip(
        columns.number,
        map(_rounded, columns.ended_s),
        map(_rounded, columns.duration_s),
        columns.num_decode_tokens,
        columns.num_prefill_tokens,
        columns.num_running,
        columns.num_waiting,
        columns.num_used_blocks,
        columns.num_preempted,
        strict=True,
    )
    return [LiveStep(*step) for step in steps]


def live_request(one: RequestPhases) -> LiveRequest:
    is_shown = one.request_id and not one.request_id.startswith(_SECRET_PREFIX)
    return LiveRequest(
        one.handle,
        one.request_id if is_shown else None,
        one.num_prompt_tokens,
        one.num_cached_tokens,
        one.num_output_tokens,
        one.finish_reason,
        [(phase, _rounded(since_s)) for phase, since_s in one.way],
    )


def _rounded(seconds: float) -> float:
    return round(seconds, _DIGITS)
