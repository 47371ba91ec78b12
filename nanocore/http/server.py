"""HttpServer: one ASGI app at listening sockets, in this event loop.

uvicorn's connections, without its Server, whose signals, polling and exits are not ours: whoever
runs this process decides when it ends. Draining lets responses that run come to their end, while
new connections are still answered: the app says that it takes no more.
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

from nanocore.http.connection import HttpConnection, ServerConnections
from nanocore.http.server_settings import ServerSettings
from nanocore.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]
BACKLOG: Final = 2048
TLS_HANDSHAKE_TIMEOUT_S: Final = 10.0
DISCONNECT_TIMEOUT_S: Final = 2.0
"""For requests to end after their connections were cut."""


class HttpServer:
    """From `start` to `close`.

    Args:
        app: plain ASGI, without lifespan.

    Raises:
        ConfigError: the files of TLS are not what they should be.
    """

    def __init__(self, app: AsgiApp, settings: ServerSettings) -> None:
        self.state = ServerConnections(settings.limits)
        self._config = _uvicorn_config(app, settings)
        self._listeners: list[asyncio.Server] = []
        self._clock: asyncio.TimerHandle | None = None

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Accept connections at these sockets, which are ours to close from now on."""
        loop = asyncio.get_running_loop()
        self._tell_time()
        timeout_s = None if self._config.ssl is None else TLS_HANDSHAKE_TIMEOUT_S
        for listening in sockets:
            self._listeners.append(
                await loop.create_server(
                    lambda: HttpConnection(self._config, self.state, {}, loop),
                    sock=listening,
                    ssl=self._config.ssl,
                    backlog=BACKLOG,
                    ssl_handshake_timeout=timeout_s,
                )
            )

    @property
    def num_running(self) -> int:
        """Requests whose response is not complete."""
        return len(self.state.tasks)

    async def drain(self, timeout_s: float) -> bool:
        """Let what runs come to its end, and then stop to accept; whether it did in this time."""
        state = self.state
        state.is_draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
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
        """Cut what is left, and wait until its requests have noticed. Idempotent."""
        self._stop_listening()
        if self._clock is not None:
            self._clock.cancel()
        for connection in list(self.state.connections):
            connection.transport.abort()
        if self.state.tasks:
            _, deaf = await asyncio.wait(self.state.tasks, timeout=DISCONNECT_TIMEOUT_S)
            if deaf:  # a bug; uvicorn would log the cancellation of each as another
                logger.error("%d requests did not notice that they are over", len(deaf))
                logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)

    def _close_idle(self) -> None:
        """Those that have a response close behind it."""
        for connection in list(self.state.connections):
            connection.shutdown()

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def _tell_time(self) -> None:
        self.state.default_headers = [(b"date", formatdate(time.time(), usegmt=True).encode())]
        self._clock = asyncio.get_running_loop().call_later(1.0, self._tell_time)


def _uvicorn_config(app: AsgiApp, settings: ServerSettings) -> Config:
    """Loaded: with the app, and TLS if asked for."""
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
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile_password=settings.ssl_keyfile_password,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=settings.ssl_cert_reqs,
    )
    try:
        config.load()
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            f"TLS with --ssl-certfile {settings.ssl_certfile}, --ssl-keyfile "
            f"{settings.ssl_keyfile or settings.ssl_certfile} and --ssl-ca-certs "
            f"{settings.ssl_ca_certs}: {reason}: each must be a PEM file that can be read, and the "
            "key the certificate's"
        ) from None
    return config
