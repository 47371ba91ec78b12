"""RequestCycle: one HTTP/1.1 request and its response, between a connection and the ASGI app.

A request's body is read as the app asks for it. A response has the content-length that the app
sets, or is chunked. `write_chunk` is a path to the transport without a coroutine.
"""

from __future__ import annotations

import asyncio
import http
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any, Final
from urllib.parse import quote

from nanocore.http.exchange import Scope

logger = logging.getLogger(__name__)

AsgiApp = Callable[[Any, Any, Any], Awaitable[None]]
Header = tuple[bytes, bytes]
_CONTROLS: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_WITHOUT_BODY: Final = (204, 304)


class FlowControl:
    """Pauses reading from a connection's client, and tells whether writing is paused."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.read_paused = False
        self.write_paused = False
        self._transport = transport
        self._is_writable = asyncio.Event()
        self._is_writable.set()

    async def drain(self) -> None:
        """Wait until writing is not paused."""
        await self._is_writable.wait()

    def pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self.write_paused = True
        self._is_writable.clear()

    def resume_writing(self) -> None:
        self.write_paused = False
        self._is_writable.set()


class RequestCycle:
    """One request and its response.

    Args:
        scope: ASGI's. default_headers: sent with each response. keep_alive: whether the connection
            stays open after the response. expects_continue: whether the client waits for a 100
            before it sends the body. logs_access: log the response's status.
        close: ends the connection. on_complete: called when the response is complete.

    Attributes:
        body: what arrived and the app has not received. disconnected: the client has gone.
    """

    def __init__(
        self,
        scope: Scope,
        transport: asyncio.Transport,
        flow: FlowControl,
        *,
        default_headers: list[Header],
        keep_alive: bool,
        expects_continue: bool,
        logs_access: bool,
        close: Callable[[], None],
        on_complete: Callable[[], None],
    ) -> None:
        self.scope = scope
        self.body = bytearray()
        self.disconnected = False
        self.keep_alive = keep_alive
        self.response_started = False
        self.response_complete = False
        self._transport = transport
        self._flow = flow
        self._default_headers = default_headers
        self._expects_continue = expects_continue
        self._logs_access = logs_access
        self._close = close
        self._on_complete = on_complete
        self._has_more = True  # of the request's body
        self._news = asyncio.Event()  # for `receive`
        self._is_chunked = False
        self._num_bytes_left = 0  # of a response with content-length

    # -- called by the connection ------------------------------------------------------------------

    def feed(self, body: bytes) -> None:
        """Add a part of the request's body."""
        self.body += body
        self._news.set()

    def end_body(self) -> None:
        self._has_more = False
        self._news.set()

    def disconnect(self) -> None:
        """Tell the app that the client has gone; nothing is sent any more."""
        self.disconnected = True
        self._news.set()

    async def run(self, app: AsgiApp) -> None:
        """Run the app. If it fails, respond with status 500, or cut a response that has begun."""
        what = self.scope["method"], self.scope["path"]
        try:
            await app(self.scope, self.receive, self.send)
            if self.response_complete or self.disconnected:
                return
            logger.error("a bug: %s %s has no complete response", *what)
        except Exception:
            logger.exception("a bug: %s %s failed", *what)
        if self.response_started:
            self._close()
        else:
            length = (b"content-length", b"0")
            close = (b"connection", b"close")
            await self.send(
                {"type": "http.response.start", "status": 500, "headers": [length, close]}
            )
            await self.send({"type": "http.response.body"})

    # -- ASGI --------------------------------------------------------------------------------------

    async def receive(self) -> dict[str, Any]:
        """Return what has arrived of the body, or that the client has gone."""
        if self._expects_continue and not self._transport.is_closing():
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._expects_continue = False
        if not self.disconnected and not self.response_complete:
            self._flow.resume_reading()
            await self._news.wait()
            self._news.clear()
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self._has_more}

    async def send(self, message: Mapping[str, Any]) -> None:
        """Write the response's head, or a part of its body.

        Raises:
            RuntimeError: the app sends what does not belong there.
        """
        if self._flow.write_paused and not self.disconnected:
            await self._flow.drain()
        if self.disconnected:
            return
        is_body = message["type"] == "http.response.body"
        if self.response_complete or is_body is not self.response_started:
            raise RuntimeError(f"an ASGI message out of order: {message['type']}")
        if is_body:
            self._write_body(message.get("body", b""), not message.get("more_body", False))
        else:
            self._write_head(message["status"], message["headers"])

    def write_chunk(self, body: bytes) -> bool:
        """Write a chunk of the body; see `Exchange.chunk_writer`.

        Returns False if the client is slow or gone, or the response is not chunked.
        """
        if (
            self._flow.write_paused
            or self.disconnected
            or self.response_complete
            or not self._is_chunked
        ):
            return False
        self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def _write_head(self, status: int, headers: list[Header]) -> None:
        self.response_started = True
        if self._logs_access:
            self._log_access(status)
        lines = [_status_line(status)]
        self._is_chunked = self.scope["method"] != "HEAD" and status not in _WITHOUT_BODY
        for name, value in (*self._default_headers, *headers):
            if _CONTROLS.search(name) or _CONTROLS.search(value):
                raise RuntimeError(f"a control character in the response's header {name!r}")
            if name == b"content-length":
                self._num_bytes_left = int(value)
                self._is_chunked = False
            elif name == b"connection" and value == b"close":
                self.keep_alive = False
                continue
            lines += (name, b": ", value, b"\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        if self._is_chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n")
        self._transport.write(b"".join(lines))

    def _write_body(self, body: bytes, is_last: bool) -> None:
        if self.scope["method"] == "HEAD":
            self._num_bytes_left = 0
        elif self._is_chunked:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            self._transport.write(chunk + b"0\r\n\r\n" if is_last else chunk)
        else:
            self._num_bytes_left -= len(body)
            if self._num_bytes_left < 0 or (is_last and self._num_bytes_left):
                raise RuntimeError("the response's body is not as long as its content-length")
            self._transport.write(body)
        if is_last:
            self.response_complete = True
            self._news.set()
            if not self.keep_alive:
                self._close()
            self._on_complete()

    def _log_access(self, status: int) -> None:
        scope = self.scope
        client = "{}:{}".format(*scope["client"]) if scope["client"] else ""
        query = "?" + scope["query_string"].decode("ascii") if scope["query_string"] else ""
        target = quote(scope["path"]) + query
        about = client, scope["method"], target, scope["http_version"], status
        logger.info('%s - "%s %s HTTP/%s" %d', *about)


@cache
def _status_line(status: int) -> bytes:
    return f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n".encode()
