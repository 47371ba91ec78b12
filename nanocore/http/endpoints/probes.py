"""Is it alive, is it ready, what is it, and how does it fare: for probes and scrapers."""

from __future__ import annotations

import asyncio
from typing import Final

from nanocore import __version__
from nanocore.http.errors import DRAINING, RETRY_LATER_S, unavailable
from nanocore.http.exchange import Exchange
from nanocore.http.exposition import CONTENT_TYPE, exposition
from nanocore.protocol.errors import NanocoreError

CONNECT_TIMEOUT_S: Final = 0.5
"""For an engine that was gone to answer: probes do not wait for long."""


async def livez(exchange: Exchange) -> None:
    """The process lives, also while it loads or drains."""
    await exchange.reply_json({"status": "alive"})


async def readyz(exchange: Exchange) -> None:
    """Whether new requests would be taken; the engine is asked only if it was gone."""
    await _check_serving(exchange)
    await exchange.reply_json({"status": "ready"})


async def health(exchange: Exchange) -> None:
    """Whether the engine answers."""
    await _check_serving(exchange)
    await exchange.client.health()
    await exchange.reply_json({"status": "ok"})


async def version(exchange: Exchange) -> None:
    """Ours."""
    await exchange.reply_json({"version": __version__})


async def metrics(exchange: Exchange) -> None:
    """For Prometheus."""
    metrics = await exchange.client.metrics()
    namespace = exchange.state.settings.metrics_namespace
    await exchange.reply(200, exposition(metrics, exchange.model_name, namespace), CONTENT_TYPE)


async def _check_serving(exchange: Exchange) -> None:
    if exchange.state.is_draining:
        raise unavailable("the server is shutting down", RETRY_LATER_S)
    if exchange.client.is_draining:
        raise unavailable(DRAINING, RETRY_LATER_S)
    if not exchange.client.is_connected:  # who is not ready gets no requests that would find it
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await exchange.client.health()
        except (TimeoutError, NanocoreError):
            raise unavailable("the engine is not connected") from None
