"""HttpServer: serves one ASGI app at listening sockets, in this event loop.

It uses uvicorn's connections but not its Server, which would handle signals and end the process.
While it drains, new connections still get responses: the app refuses them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from email.utils import formatdate
from typing import Any, Final

from uvicorn.config import Config

from nanocore.http.server.http_connection import HttpConnection, ServerConnections
from nanocore.http.server.listening import BACKLOG
from nanocore.http.server.tls import tls_context
from nanocore.http.server_settings import ServerSettings
from nanocore.protocol.errors import counted

logger = logging.getLogger(__name__)

AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]
TLS_HANDSHAKE_TIMEOUT_S: Final = 10.0
DISCONNECT_TIMEOUT_S: Final = 2.0
"""Limit for requests to end after their connections were cut."""


class HttpServer:
    """The server, from `start` to `close`.

    Args:
        app: plain ASGI, without lifespan.

    Raises:
        ConfigError: the TLS files are invalid.
    """

    def __init__(self, app: AsgiApp, settings: ServerSettings) -> None:
        self.state = ServerConnections(settings.limits)
        self._config = _uvicorn_config(app, settings)
        self._tls = tls_context(settings)
        self._listeners: list[asyncio.Server] = []
        self._clock: asyncio.TimerHandle | None = None

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Accept connections at these sockets, which the server closes."""
        loop = asyncio.get_running_loop()
        self._update_date()
        timeout_s = None if self._tls is None else TLS_HANDSHAKE_TIMEOUT_S
        for listening in sockets:
            self._listeners.append(
                await loop.create_server(
                    lambda: HttpConnection(self._config, self.state, {}, loop),
                    sock=listening,
                    ssl=self._tls,
                    backlog=BACKLOG,
                    ssl_handshake_timeout=timeout_s,
                )
            )

    @property
    def num_running(self) -> int:
        return len(self.state.tasks)

    async def drain(self, timeout_s: float) -> bool:
        """Wait for running responses, then stop accepting; return whether all have ended."""
        state = self.state
        state.is_draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                # Listen on while responses run: a load balancer may still send requests, and the
                # app's 503 is better for them than a refused connection.
                self._close_idle()
                while state.tasks:
                    await asyncio.wait(state.tasks)
                self._stop_listening()
                while state.connections:
                    self._close_idle()
                    state.all_closed.clear()
                    await state.all_closed.wait()
        return not state.connections

    async def close(self) -> None:
        """Cut the remaining connections and wait for their requests to end. Idempotent."""
        self._stop_listening()
        if self._clock is not None:
            self._clock.cancel()
        for connection in list(self.state.connections):
            connection.transport.abort()
        if self.state.tasks:
            _, pending = await asyncio.wait(self.state.tasks, timeout=DISCONNECT_TIMEOUT_S)
            if pending:  # a bug; uvicorn would also log each cancellation as an error
                logger.error("%s outlived the connection", counted(len(pending), "request"))
                logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)

    def _close_idle(self) -> None:
        # A connection with a running response closes after it.
        for connection in list(self.state.connections):
            connection.shutdown()

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def _update_date(self) -> None:
        self.state.default_headers = [(b"date", formatdate(time.time(), usegmt=True).encode())]
        self._clock = asyncio.get_running_loop().call_later(1.0, self._update_date)


def _uvicorn_config(app: AsgiApp, settings: ServerSettings) -> Config:
    config = Config(
        app,
        http=HttpConnection,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=settings.access_log,
        proxy_headers=False,
        server_header=False,
        workers=1,
        timeout_keep_alive=settings.limits.keep_alive_timeout_s,  # type: ignore[arg-type]
    )
    config.load()
    return config
