"""Probes, version, metrics and model names, for monitors and SDKs."""

from __future__ import annotations

import asyncio
from typing import Any, Final, Literal

import msgspec

from nanocore import __version__
from nanocore.http.exchange import Exchange
from nanocore.http.http_errors import DRAINING, RETRY_LATER_S, unavailable
from nanocore.protocol.errors import NanocoreError

CONNECT_TIMEOUT_S: Final = 0.5
"""Limit for reconnecting to a lost engine within a probe."""


class Model(msgspec.Struct, kw_only=True):
    """A name of the model, with the fields of OpenAI's and of Anthropic's API.

    default_sampling: what the model recommends for requests without parameters; {}: nothing.
    """

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str
    created: int
    created_at: str
    owned_by: str = "nanocore"
    root: str
    max_model_len: int
    default_sampling: dict[str, Any]


class ModelList(msgspec.Struct, kw_only=True):
    """All names of the model. first_id, last_id and has_more are Anthropic's."""

    object: Literal["list"] = "list"
    data: list[Model]
    first_id: str
    last_id: str
    has_more: Literal[False] = False


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
    await exchange.reply_json(ModelList(data=models, first_id=names[0], last_id=names[-1]))


async def get_model(exchange: Exchange) -> None:
    await exchange.reply_json(_model(exchange, exchange.check_model(exchange.path_id)))


def _model(exchange: Exchange, name: str) -> Model:
    card = exchange.client.model_card
    started = exchange.state.started
    return Model(
        id=name,
        display_name=name,
        created=int(started.timestamp()),
        created_at=started.isoformat(),
        root=card.model,
        max_model_len=card.max_model_len,
        default_sampling=msgspec.to_builtins(card.default_sampling),
    )


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
