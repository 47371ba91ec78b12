"""An HttpServer around a small app, over loopback, and a client that sends any bytes."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from nanocore.http.server.http_server import HttpServer
from nanocore.http.server_settings import ConnectionLimits, ServerSettings

App = Callable[[Any, Any, Any], Awaitable[None]]
TIMEOUT_S = 30.0
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class RecordingApp:
    """Answers with what it was asked, as JSON; keeps scopes and bodies, and counts disconnects.

    A path of /hold waits with its answer for `release`, and then for the client's disconnect if
    that comes first.
    """

    def __init__(self) -> None:
        self.scopes: list[Any] = []
        self.bodies: list[bytes] = []
        self.num_disconnects = 0
        self.began = asyncio.Event()
        self.release = asyncio.Event()
        self.disconnected = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self._note_disconnect()
                return
            body += message["body"]
            more = message["more_body"]
        self.bodies.append(body)
        if scope["path"] == "/hold":
            await self._hold(receive)
        answer = json.dumps({"path": scope["path"], "bytes": len(body)}).encode()
        headers = [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def _hold(self, receive: Any) -> None:
        self.began.set()
        release = asyncio.ensure_future(self.release.wait())
        gone = asyncio.ensure_future(receive())
        await asyncio.wait({release, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            self._note_disconnect()
        release.cancel()
        gone.cancel()

    def _note_disconnect(self) -> None:
        self.num_disconnects += 1
        self.disconnected.set()


class Client:
    """A connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, data: bytes) -> tuple[int, bytes]:
        """Send, and read one answer: its status and body."""
        self.writer.write(data)
        return await self.answer()

    async def answer(self) -> tuple[int, bytes]:
        """One answer that has a content-length."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        return int(head.split()[1]), await self.reader.readexactly(length)

    async def rest(self) -> bytes:
        """What comes until the server closes, and close; empty if it resets the connection."""
        try:
            return await self.reader.read()
        except ConnectionResetError:
            return b""
        finally:
            self.writer.close()


class Loopback:
    """A running server."""

    def __init__(self, server: HttpServer, port: int) -> None:
        self.server = server
        self.port = port
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self) -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.append(writer)
        return Client(reader, writer)

    async def all_gone(self) -> None:
        """Wait until the server has no connection and no request any more."""
        state = self.server.state
        while state.connections:
            state.all_closed.clear()
            await state.all_closed.wait()
        if state.tasks:
            await asyncio.wait(state.tasks)

    def close_clients(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


@asynccontextmanager
async def serving(app: App, **limits: Any) -> AsyncIterator[Loopback]:
    """A server at a free port."""
    server = HttpServer(app, ServerSettings(limits=ConnectionLimits(**limits)))
    listening = socket.create_server(("127.0.0.1", 0))
    loopback = Loopback(server, listening.getsockname()[1])
    await server.start([listening])
    try:
        yield loopback
    finally:
        loopback.close_clients()
        await server.close()


@asynccontextmanager
async def connected(app: App, **limits: Any) -> AsyncIterator[tuple[Loopback, Client]]:
    """A server, and a client that is connected to it."""
    async with serving(app, **limits) as server:
        yield server, await server.connect()
