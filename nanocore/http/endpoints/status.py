"""Probes, version, metrics and model names, for monitors and SDKs."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from nanocore import __version__
from nanocore.client import RequestPhases, StepColumns
from nanocore.http.exchange import Exchange
from nanocore.http.http_errors import DRAINING, RETRY_LATER_S, bad_request, unavailable
from nanocore.protocol.errors import NanocoreError
from nanocore.protocol.fields import MAX_EXACT_INT

CONNECT_TIMEOUT_S: Final = 0.5
"""Limit for reconnecting to a lost engine within a probe."""
_DIGITS: Final = 6
"""Decimal digits of seconds: microseconds."""
_SECRET_PREFIX: Final = "resp_"
"""Prefix of ids that give access to a stored response, so only its client may know them."""


async def livez(exchange: Exchange) -> None:
    await exchange.reply_json({"status": "alive"})


async def readyz(exchange: Exchange) -> None:
    await _check_serving(exchange)
    await exchange.reply_json({"status": "ready"})


async def health(exchange: Exchange) -> None:
    await _check_serving(exchange)
    await exchange.client.health()
    await exchange.reply_json({"status": "ok"})


async def version(exchange: Exchange) -> None:
    await exchange.reply_json({"version": __version__})


async def metrics(exchange: Exchange) -> None:
    from nanocore.http.exposition import CONTENT_TYPE, exposition  # imports prometheus_client

    metrics = await exchange.client.metrics()
    namespace = exchange.state.settings.metrics_namespace
    await exchange.reply(200, exposition(metrics, exchange.model_name, namespace), CONTENT_TYPE)


async def list_models(exchange: Exchange) -> None:
    names = exchange.settings.served_model_names or (exchange.model_name,)
    models = [_model(exchange, name) for name in names]
    about = {"first_id": names[0], "last_id": names[-1], "has_more": False}  # Anthropic's
    await exchange.reply_json({"object": "list", "data": models, **about})


async def get_model(exchange: Exchange) -> None:
    await exchange.reply_json(_model(exchange, exchange.check_model(exchange.path_id)))


def _model(exchange: Exchange, name: str) -> dict[str, Any]:
    """Return a name of the model, with the fields of OpenAI's and of Anthropic's API."""
    card = exchange.client.model_card
    started = exchange.state.started
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": int(started.timestamp()),
        "created_at": started.isoformat(),
        "owned_by": "nanocore",
        "root": card.model,
        "max_model_len": card.max_model_len,
        # What the model recommends for requests without parameters; {}: nothing.
        "default_sampling": card.default_sampling,
    }


async def _check_serving(exchange: Exchange) -> None:
    if exchange.state.is_draining:
        raise unavailable("the server is shutting down", RETRY_LATER_S)
    if exchange.client.is_draining:
        raise unavailable(DRAINING, RETRY_LATER_S)
    # The client reconnects only for requests, and a server that is not ready gets none, so the
    # probe has to reconnect.
    if not exchange.client.is_connected:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await exchange.client.health()
        except (TimeoutError, NanocoreError):
            raise unavailable("the engine is not connected") from None


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


async def live(exchange: Exchange) -> None:
    after = _after(exchange.query().get("after", "0"))
    client = exchange.client
    recent = await client.recent_steps(after)
    card = client.model_card
    view = {
        "engine": client.engine_instance,  # id of its run, whose clock gives all times
        "model": exchange.model_name,
        "max_model_len": card.max_model_len,
        "num_blocks": card.num_blocks,
        "now_s": recent.now_s,
        "draining": client.is_draining or exchange.state.is_draining,
        "stats": recent.stats,
        "steps": live_steps(recent.steps),
        "requests": [live_request(one) for one in recent.requests],
    }
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
    # The fields of both are in the same order.
    steps = zip(*msgspec.structs.astuple(columns), strict=True)
    return [
        LiveStep(number, _rounded(ended_s), _rounded(duration_s), *counts)
        for number, ended_s, duration_s, *counts in steps
    ]


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
