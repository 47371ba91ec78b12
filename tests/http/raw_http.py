"""An App with a real engine's client, served over loopback in this event loop; clients of bytes.

What a server may not do whatever it is sent is checked when it ends: nothing was logged as an
error, no request and no connection is left.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, Final

from nanocore.client import AsyncEngineClient
from nanocore.demo_model import demo_model_folder
from nanocore.http.app import App
from nanocore.http.server.http_server import HttpServer
from nanocore.http.server_settings import AppSettings, ConnectionLimits, ServerSettings
from tests.end_to_end.forked import Engine, engine

TIMEOUT_S: Final = 60.0
"""Nothing takes so long but what hangs."""
_STATUS: Final = re.compile(rb"(?:\A|[\n}])HTTP/1\.1 (\d\d\d) ")


class Answer:
    """status, headers (names in lower case), body."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body


class RawClient:
    """A connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.has_left = False

    async def ask(self, data: bytes) -> Answer:
        """Send, and read one answer."""
        self.writer.write(data)
        return await self.answer(has_body=not data.startswith(b"HEAD "))

    async def answer(self, has_body: bool = True) -> Answer:
        """One whole answer."""
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
        fields = (line.partition(": ") for line in lines if line)
        headers = {name.lower(): value for name, _, value in fields}
        body = b""
        if has_body and "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        elif has_body and headers.get("transfer-encoding") == "chunked":
            while size := int((await self.reader.readline()).strip(), 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
            assert await self.reader.readline() == b"\r\n"
        return Answer(int(first.split()[1]), headers, body)

    async def rest(self) -> bytes:
        """All that comes until the server closes."""
        return await self.reader.read()

    def leave(self) -> None:
        """Close, without a word."""
        self.has_left = True
        self.writer.transport.abort()


class RawServer:
    """A running one."""

    def __init__(self, server: HttpServer, client: AsyncEngineClient, app: App, port: int) -> None:
        self.server, self.client, self.app, self.port = server, client, app, port
        self._peers: list[RawClient] = []

    async def connect(self) -> RawClient:
        peer = RawClient(*await asyncio.open_connection("127.0.0.1", self.port))
        self._peers.append(peer)
        return peer

    async def statuses(self, data: bytes) -> list[int]:
        """Send, wait until the server closes, and see what it has answered.

        The connection ends with a FIN, never with a reset, which would show as an error.
        """
        client = await self.connect()
        client.writer.write(data)
        found = await client.rest()
        client.leave()
        assert not found or found.startswith(b"HTTP/1.1 "), found[:100]
        return [int(status) for status in _STATUS.findall(found)]

    def close_clients(self) -> None:
        for peer in self._peers:
            peer.leave()

    async def all_gone(self) -> None:
        """Close what clients have open, and wait until no connection and no request is left."""
        self.close_clients()
        await self.connections_gone()
        while self.server.state.tasks:
            await asyncio.wait(list(self.server.state.tasks))

    async def connections_gone(self) -> None:
        """Wait until all that clients have left are gone."""
        last = await self.connect()  # the others are accepted before it
        await last.ask(get("/livez"))
        last.leave()
        while len(self.server.state.connections) > sum(not peer.has_left for peer in self._peers):
            await asyncio.sleep(0)
        self._peers = [peer for peer in self._peers if not peer.has_left]


def demo_engine(*flags: str) -> AbstractContextManager[Engine]:
    """With the demo model, in a process of its own."""
    model = demo_model_folder()
    return engine(model, "--kv-cache-memory-bytes", "64000000", *flags)


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


@asynccontextmanager
async def raw_server(
    endpoint: str, send_buffer_bytes: int | None = None, **limits: Any
) -> AsyncIterator[RawServer]:
    """A server beside the engine at this endpoint; `all_gone` is awaited at its end.

    send_buffer_bytes: what the kernel holds for a connection; None: what it likes.
    """
    app = App(AppSettings(served_model_names=("demo",)))
    errors = _Errors()
    logging.getLogger().addHandler(errors)
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: errors.found.append(repr(context))
    )
    try:
        async with AsyncEngineClient.connect(endpoint, timeout_s=TIMEOUT_S) as client:
            await client.get_tokenizer()
            app.state.client = client
            server = HttpServer(app, ServerSettings(limits=ConnectionLimits(**limits)))
            listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
            if send_buffer_bytes is not None:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
            running = RawServer(server, client, app, listening.getsockname()[1])
            await server.start([listening])
            try:
                yield running
                await running.all_gone()
            finally:
                running.close_clients()
                await server.close()
    finally:
        logging.getLogger().removeHandler(errors)
    assert errors.found == []


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A request."""
    lines = [
        f"POST {path} HTTP/1.1", "host: x", "content-type: application/json",
        f"content-length: {len(body)}", *headers,
    ]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def get(path: str, *headers: str, method: str = "GET") -> bytes:
    """A request."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: x", *headers, "", ""]).encode("latin-1")
