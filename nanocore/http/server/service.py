"""HttpService: the app, its HTTP server and its engine client, in this process's event loop.

It listens before the engine is connected, so that liveness probes succeed while the model loads.
"""

from __future__ import annotations

import gc
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from msgspec.structs import asdict

from nanocore.client import AsyncEngineClient
from nanocore.client.connection.tokenizer_loader import TokenizerPreload
from nanocore.http.app import App
from nanocore.http.http_errors import RETRY_LATER_S, unavailable
from nanocore.http.server.http_server import HttpServer
from nanocore.http.server_settings import AppSettings, EngineAddress, ServerSettings
from nanocore.protocol.errors import NanocoreError, StartFile
from nanocore.protocol.messages import ModelCard

FLUSH_TIMEOUT_S: Final = 1.0
"""Limit for clients to read the error that ends their response."""


class HttpService:
    """The service, from `start` to `close`.

    Raises:
        ConfigError: the TLS files are invalid.
    """

    def __init__(self, app_settings: AppSettings, server_settings: ServerSettings) -> None:
        self._app = App(app_settings)
        self._server = HttpServer(self._app, server_settings)
        self._client: AsyncEngineClient | None = None
        self._tokenizer_preload: TokenizerPreload | None = None

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Accept connections; the sockets are closed by this service."""
        state = self._app.state
        if state.settings.otlp_traces_endpoint is not None:
            from nanocore.http.request_spans import otlp_spans  # imports opentelemetry

            state.spans = otlp_spans(state.settings.otlp_traces_endpoint)
        await self._server.start(sockets)

    def preload_tokenizer(self, files: Sequence[StartFile]) -> None:
        """Make the tokenizer of an engine that starts; see `TokenizerPreload`."""
        self._tokenizer_preload = TokenizerPreload()
        self._tokenizer_preload.begin(files)

    async def connect(self, engine: EngineAddress, timeout_s: float) -> ModelCard:
        """Connect to the engine, make its tokenizer, and return its model card.

        Raises:
            NanocoreError: see `AsyncEngineClient.connect`.
        """
        client = AsyncEngineClient.connect(**asdict(engine), timeout_s=timeout_s)
        client.tokenizer_preload = self._tokenizer_preload
        await client.__aenter__()
        self._client = client
        with suppress(NanocoreError):  # a request that needs it hears why
            await client.get_tokenizer()
        self._app.state.client = client
        freeze_startup()
        return client.model_card

    @property
    def is_idle(self) -> bool:
        """Whether no request waits for its response or for the rest of it."""
        return not self._server.num_running

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the running ones; return whether all have finished.

        Those that have not end with an error.
        """
        state = self._app.state
        state.is_draining = True
        if await self._server.drain(timeout_s):
            return True
        state.deliveries.fail_all(unavailable("the server is shutting down", RETRY_LATER_S))
        await self._server.drain(FLUSH_TIMEOUT_S)
        return False

    async def close(self) -> None:
        """Cut the remaining connections and disconnect from the engine. Idempotent."""
        await self._server.close()
        if self._client is not None:
            await self._client.close()
        spans, self._app.state.spans = self._app.state.spans, None
        if spans is not None:
            await spans.close()


def freeze_startup() -> None:
    """Exclude all existing objects from garbage collection, which would walk them in vain."""
    gc.collect()
    gc.freeze()
