"""HttpService: the app, its server and its client of the engine, in this process's event loop.

It listens at once and knows the engine later, so that it can be asked meanwhile whether it lives.
"""

from __future__ import annotations

import gc
import socket
from collections.abc import Sequence
from typing import Final

import msgspec

from nanocore.client import AsyncEngineClient
from nanocore.http.app import App
from nanocore.http.errors import RETRY_LATER_S, unavailable
from nanocore.http.server import HttpServer
from nanocore.http.server_settings import ServerSettings
from nanocore.http.settings import AppSettings
from nanocore.protocol.messages import ModelCard

FLUSH_TIMEOUT_S: Final = 1.0
"""For clients to take the error with which what is cut ends."""


class EngineAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where the engine is, and what its clients need. It travels to worker processes as JSON.

    endpoints: of one engine, or of several that serve the same model; one of them is used.
    """

    endpoints: tuple[str, ...]
    curve_dir: str | None = None
    tokenizer: str | None = None

    def client(self, timeout_s: float) -> AsyncEngineClient:
        """A client that is not entered yet.

        Raises:
            ConfigError: the endpoint or its keys cannot be used.
        """
        return AsyncEngineClient.connect(
            self.endpoints,
            curve_dir=self.curve_dir,
            tokenizer=self.tokenizer,
            timeout_s=timeout_s,
        )


class HttpService:
    """From `start` to `close`.

    Raises:
        ConfigError: the files of TLS are not what they should be.
    """

    def __init__(self, app_settings: AppSettings, server_settings: ServerSettings) -> None:
        self._app = App(app_settings)
        self._server = HttpServer(self._app, server_settings)
        self._client: AsyncEngineClient | None = None

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Listen. The sockets are ours to close from now on."""
        state = self._app.state
        if state.settings.otlp_traces_endpoint is not None:
            from nanocore.http.spans import otlp_spans  # imports opentelemetry

            state.spans = otlp_spans(state.settings.otlp_traces_endpoint)
        await self._server.start(sockets)

    async def connect(self, engine: EngineAddress, timeout_s: float) -> ModelCard:
        """Serve what this engine has.

        Raises:
            NanocoreError: as `AsyncEngineClient.connect` says.
        """
        client = engine.client(timeout_s)
        await client.__aenter__()
        self._client = self._app.state.client = client
        return client.model_card

    @property
    def num_running(self) -> int:
        """Requests whose response is not complete."""
        return self._server.num_running

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing new, and let what runs come to its end; whether it did in this time.

        What did not ends with an error.
        """
        state = self._app.state
        state.is_draining = True
        if await self._server.drain(timeout_s):
            return True
        state.deliveries.fail_all(unavailable("the server is shutting down", RETRY_LATER_S))
        await self._server.drain(FLUSH_TIMEOUT_S)
        return False

    async def close(self) -> None:
        """Cut what is left, and leave the engine. Idempotent."""
        await self._server.close()
        if self._client is not None:
            await self._client.close()
        spans, self._app.state.spans = self._app.state.spans, None
        if spans is not None:
            await spans.close()


def freeze_startup() -> None:
    """What was made until now lives on: keep the garbage collector from walking it."""
    gc.collect()
    gc.freeze()
