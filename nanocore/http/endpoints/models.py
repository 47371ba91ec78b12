"""The models that clients may name: one, by all its names."""

from __future__ import annotations

from typing import Any

from nanocore.http.exchange import Exchange


async def list_models(exchange: Exchange) -> None:
    """GET /v1/models."""
    names = exchange.settings.served_model_names or (exchange.model_name,)
    models = [_model(exchange, name) for name in names]
    # first_id, last_id and has_more are Anthropic's.
    await exchange.reply_json(
        {
            "object": "list",
            "data": models,
            "first_id": names[0],
            "last_id": names[-1],
            "has_more": False,
        }
    )


async def get_model(exchange: Exchange) -> None:
    """GET /v1/models/{id}."""
    await exchange.reply_json(_model(exchange, exchange.check_model(exchange.path_id)))


def _model(exchange: Exchange, name: str) -> dict[str, Any]:
    card = exchange.client.model_card
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": int(exchange.state.started.timestamp()),
        "created_at": exchange.state.started.isoformat(),
        "owned_by": "nanocore",
        "root": card.model,
        "max_model_len": card.max_model_len,
    }
