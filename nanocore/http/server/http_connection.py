"""HttpConnection: uvicorn's HTTP/1.1 connection with limits on sizes and times.

Headers have a limit of size and time, a body of time; a connection that is idle, or whose client
reads nothing of its response, is closed. An invalid request gets a JSON error, after the responses
of whole requests before it, and its connection is closed. A lost connection disconnects all its
requests; uvicorn does that for the last one only. Sending is uvicorn's; `chunk_writer` is a faster
path to the transport.
"""

from __future__ import annotations

import asyncio
import http
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NoReturn
from urllib.parse import urlsplit

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from nanocore.http.exchange import CHUNK_WRITER
from nanocore.http.http_errors import HttpError, openai_body
from nanocore.http.server_settings import ConnectionLimits

MAX_URL_BYTES: Final = 16 * 1024
MAX_PIPELINED: Final = 8
"""Requests on one connection that may wait for their response."""
LINGER_S: Final = 2.0
"""Time for a client to read an error: closing with unread data would reset the connection first."""
MAX_UNSENT_BYTES: Final = 16 * 1024
"""Write buffer of a slow client; small chunks cost several times their size in it."""
_DEFAULT_PORTS: Final = {b"http": b":80", b"https": b":443"}
_MAX_SHOWN: Final = 64


class ServerConnections(ServerState):
    """State that the connections of one server share.

    is_draining: each closes after its response. all_closed: set when the last one closes.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        super().__init__()
        self.limits = limits
        self.is_draining = False
        self.all_closed = asyncio.Event()


def chunk_writer(cycle: RequestResponseCycle) -> Callable[[bytes], bool]:
    """Return a function that writes a chunk of the body without a coroutine.

    It returns False if the client is slow or gone, or the response is not chunked: then the caller
    uses `send`. See `Exchange.chunk_writer`.
    """
    flow, write = cycle.flow, cycle.transport.write

    def write_chunk(body: bytes) -> bool:
        if (
            flow.write_paused
            or cycle.disconnected
            or cycle.response_complete
            or not cycle.chunked_encoding
        ):
            return False
        write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    return write_chunk


class _ResponseTransport:
    """A response's view of the transport; the connection decides whether `close` closes it."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class HttpConnection(HttpToolsProtocol):
    """One connection."""

    server_state: ServerConnections

    def __init__(
        self,
        config: Config,
        server_state: ServerConnections,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = server_state.limits
        self._response_transport: _ResponseTransport | None = None
        self._cycles: deque[RequestResponseCycle] = deque()  # in order; the first one runs
        self._deadline: asyncio.TimerHandle | None = None
        self._deadline_is_of_body: bool | None = None
        self._is_reading = True  # waits for a message, or for the rest of one
        self._has_begun = False
        self._has_headers = False
        self._head_bytes = 0  # of complete header fields
        self._held_bytes = 0  # read by the parser since the last complete field
        self._has_advanced = False
        self._stall: asyncio.TimerHandle | None = None  # while the client reads nothing
        self._is_deaf = False  # input is dropped
        self._closes_after_body = False
        self._refusal: tuple[int, str] | None = None

    # -- called by the transport -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        self._response_transport = _ResponseTransport(transport, self._close_after_response)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(503, "there are too many connections: try again later")
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_deaf = True
        self._cancel_deadline()
        self._end_stall()
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        super().connection_lost(exc)
        self._response_transport = None
        if not self.connections:
            self.server_state.all_closed.set()
        # uvicorn notifies the last request only; the running one may be another.
        if (running := self._running) is not None:
            running.disconnected = True
            running.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        self._unset_keepalive_if_required()
        self._has_advanced = False
        try:
            self._feed(data)
            # Bytes of an incomplete field count, too, or an endless field would never reach the
            # limit.
            self._held_bytes = 0 if self._has_advanced else self._held_bytes + len(data)
            self._check_head()
        except httptools.HttpParserError:
            if not self.transport.is_closing():
                self._refuse(*(self._refusal or (400, "invalid HTTP/1.1 request")))
        else:
            self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self._limits.send_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_stall()

    # -- called by the parser ----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_reading = self._has_begun = self._has_advanced = True
        self._has_headers = False
        self._head_bytes = 0
        self._deadline_is_of_body = None  # `_watch` will set a new deadline

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._has_advanced = True
        self._head_bytes += len(url)
        if len(self.url) > MAX_URL_BYTES:
            self._fail(414, f"the request's path is longer than {MAX_URL_BYTES} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_advanced = True
        self._head_bytes += len(name) + len(value) + 4
        self._check_head()
        if not self._has_headers:  # trailers are ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._has_advanced = True
        if self.parser.should_upgrade():
            return  # `_feed` parses this message again
        if self.parser.get_http_version() not in ("1.1", "1.0"):
            self._fail(400, "only HTTP/1.1 is supported")
        self._check_host()
        self._check_coding()
        self._has_headers = True  # from here on `cycle` is this message's
        super().on_headers_complete()
        cycle = self.cycle
        self._cycles.append(cycle)
        cycle.transport = self._response_transport  # type: ignore[assignment]
        cycle.scope["extensions"] = {CHUNK_WRITER: chunk_writer(cycle)}  # type: ignore[dict-item]
        if self.server_state.is_draining:
            cycle.keep_alive = False
        if self.pipeline:
            self.flow.resume_reading()  # otherwise the end of the connection would go unnoticed
            if len(self.pipeline) > MAX_PIPELINED:
                self._fail(400, f"over {MAX_PIPELINED} pipelined requests: read responses first")

    def on_chunk_header(self) -> None:
        self._has_advanced = True

    def on_body(self, body: bytes) -> None:
        self._has_advanced = True
        if len(self.cycle.body) > HIGH_WATER_LIMIT and self._running not in (self.cycle, None):
            self._fail(400, "a pipelined request is too large")
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._is_reading = False
        self._has_advanced = True
        super().on_message_complete()
        if self._closes_after_body:
            self.transport.close()
            raise httptools.HttpParserError("the connection is closed")

    # -- called by the server and by responses -----------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_deaf and self._refusal is not None and self._running is None:
            self._unset_keepalive_if_required()
            if not self.transport.is_closing():
                self._send_error(*self._refusal)
        elif self._is_reading and self._has_begun:
            self._unset_keepalive_if_required()  # the next message has its own deadline

    def shutdown(self) -> None:
        if self._is_response_early:
            self._closes_after_body = True
        else:
            super().shutdown()

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _running(self) -> RequestResponseCycle | None:
        """The request whose response comes next."""
        while self._cycles and self._cycles[0].response_complete:
            self._cycles.popleft()
        return self._cycles[0] if self._cycles else None

    @property
    def _is_response_early(self) -> bool:
        """Whether a request got its whole response before it was read to its end."""
        return self._is_reading and self._has_headers and self.cycle.response_complete

    def _close_after_response(self) -> None:
        # Called for the connection's last response. A request that is still arriving is read to its
        # end or its deadline first: closing with unread data resets the connection, and the client
        # would lose the response.
        if self._is_response_early:
            self._closes_after_body = True
        else:
            self.transport.close()

    def _feed(self, data: bytes) -> None:
        # An upgrade is ignored, as RFC 9110 allows: HTTP/2 clients offer one in requests with a
        # body, which httptools would take for the new protocol's.
        while True:
            try:
                return self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._plain_head() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)

    def _plain_head(self) -> bytes:
        """Return the head of this message without the offer to upgrade."""
        if self.parser.get_method() == b"CONNECT":
            self._fail(405, "this server is not a proxy")
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [b"%b: %b" % field for field in self.headers if field[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _check_host(self) -> None:
        # There must be one Host header, and a URL as target must agree with it; otherwise a proxy
        # could check one host and `check_host` another. Only the URL's path is kept.
        hosts = [value.strip().lower() for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            self._fail(400, f"an HTTP/1.1 request needs one Host header, not {len(hosts)}")
        if self.url.startswith((b"/", b"*")):
            return
        target = urlsplit(self.url)
        if target.scheme not in _DEFAULT_PORTS:
            self._fail(400, "the request's target must be a path, or an http or https URL")
        port = _DEFAULT_PORTS[target.scheme]
        host = target.netloc.lower().removesuffix(port)
        if [value.removesuffix(port) for value in hosts] != [host]:
            self._fail(400, "the request's target and its Host header name different hosts")
        self.url = (target.path or b"/") + (target.query and b"?" + target.query)

    def _check_coding(self) -> None:
        # The parser accepts any coding as long as the last one is "chunked".
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if codings and [value.strip().lower() for value in codings] != [b"chunked"]:
            shown = b", ".join(codings).decode("latin-1")[:_MAX_SHOWN]
            self._fail(400, f"the transfer coding {shown!r} is not supported: use chunked only")

    def _check_head(self) -> None:
        if self._head_bytes + self._held_bytes > self._limits.max_header_bytes:
            limit = self._limits.max_header_bytes
            self._fail(431, f"the request's headers have more than {limit} bytes")

    def _fail(self, status: int, message: str) -> NoReturn:
        # The exception stops the parser; `data_received` sends the refusal.
        self._refusal = status, message
        raise httptools.HttpParserError(message)

    def _watch(self) -> None:
        # One timer: a deadline while a message arrives, keep-alive while nothing is due.
        if not self._is_reading:
            self._cancel_deadline()
            if self._running is None:
                self._unset_keepalive_if_required()
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
        elif self._deadline is None or self._deadline_is_of_body is not self._has_headers:
            self._cancel_deadline()
            limits = self._limits
            seconds = limits.body_timeout_s if self._has_headers else limits.header_timeout_s
            self._deadline_is_of_body = self._has_headers
            self._deadline = self.loop.call_later(seconds, self._on_deadline)

    def _on_deadline(self) -> None:
        self._deadline = None
        if self.flow.read_paused:  # the client waits for the server
            self._watch()
        elif not self._has_begun or self._closes_after_body:
            self.transport.close()
        else:
            limits = self._limits
            timeout_s = limits.body_timeout_s if self._has_headers else limits.header_timeout_s
            part = "body" if self._has_headers else "headers"
            self._refuse(408, f"the request's {part} did not arrive within {timeout_s:g} s")

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _refuse(self, status: int, message: str) -> None:
        """Read no further; send an error after the responses of whole requests, and close."""
        self._is_deaf = True
        self._cancel_deadline()
        self.flow.resume_reading()
        running = self._running
        is_within_body = self._is_reading and self._has_headers
        if is_within_body and self.pipeline and self.pipeline[0][0] is self.cycle:
            self.pipeline.popleft()  # its endpoint is never called
            self._cycles.pop()
        if running is None:
            self._send_error(status, message)
        elif is_within_body and self.cycle is running:
            running.disconnected = True
            running.message_event.set()
            if running.response_started:
                self.transport.close()
            else:
                self._send_error(status, message)
        else:
            self._refusal = status, message  # `on_response_complete` sends it

    def _send_error(self, status: int, message: str) -> None:
        body = openai_body(HttpError(status, message))
        phrase = http.HTTPStatus(status).phrase
        retry = "retry-after: 1\r\n" if status == 503 else ""
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n{retry}"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._deadline = self.loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()
