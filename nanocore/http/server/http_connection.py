"""HttpConnection: an HTTP/1.1 connection, parsed by httptools, with limits on sizes and times.

Headers have a limit of size and time, a body of time; a connection that is idle, or whose client
reads nothing of its response, is closed. An invalid request gets a JSON error, after the responses
of whole requests before it, and its connection is closed. A lost connection disconnects all its
requests. Requests that are sent before the response to the last one wait for their turn.
"""

from __future__ import annotations

import asyncio
import http
from collections import deque
from typing import Final, NoReturn
from urllib.parse import unquote, urlsplit

import httptools

from nanocore.http.exchange import CHUNK_WRITER
from nanocore.http.http_errors import HttpError, openai_body
from nanocore.http.server.request_cycle import AsgiApp, FlowControl, Header, RequestCycle
from nanocore.http.server_settings import ConnectionLimits

MAX_URL_BYTES: Final = 16 * 1024
MAX_PIPELINED: Final = 8
"""Requests on one connection that may wait for their response."""
LINGER_S: Final = 2.0
"""Time for a client to read an error: closing with unread data would reset the connection first."""
MAX_UNSENT_BYTES: Final = 16 * 1024
"""Write buffer of a slow client; small chunks cost several times their size in it."""
MAX_UNREAD_BYTES: Final = 64 * 1024
"""Limit of a body's bytes that the app has not received; above it reading pauses."""
_DEFAULT_PORTS: Final = {b"http": b":80", b"https": b":443"}
_MAX_SHOWN: Final = 64


class ServerConnections:
    """State that the connections of one server share.

    tasks: of running requests. default_headers: sent with each response. is_draining: each
    connection closes after its response. all_closed: set when the last one closes.
    """

    def __init__(self, app: AsgiApp, limits: ConnectionLimits, logs_access: bool) -> None:
        self.app = app
        self.limits = limits
        self.logs_access = logs_access
        self.connections: set[HttpConnection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.default_headers: list[Header] = []
        self.is_draining = False
        self.all_closed = asyncio.Event()


class HttpConnection(asyncio.Protocol):
    """One connection. cycle: the newest request; None before the first."""

    def __init__(self, state: ServerConnections, loop: asyncio.AbstractEventLoop) -> None:
        self.cycle: RequestCycle | None = None
        self.transport: asyncio.Transport
        self._state = state
        self._limits = state.limits
        self._loop = loop
        self._parser = self._new_parser()
        self._flow: FlowControl
        self._url = b""
        self._headers: list[Header] = []
        self._cycles: deque[RequestCycle] = deque()  # in order; the first one runs
        self._waiting: deque[RequestCycle] = deque()  # those of them that do not run yet
        self._keep_alive: asyncio.TimerHandle | None = None  # while nothing is due
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
        self.transport = transport
        self._flow = FlowControl(transport)
        self._state.connections.add(self)
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        if len(self._state.connections) > self._limits.max_connections:
            self._refuse(503, "there are too many connections: try again later")
        else:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_deaf = True
        self._cancel_deadline()
        self._end_stall()
        self._cancel_keep_alive()
        self._waiting.clear()
        self._state.connections.discard(self)
        if not self._state.connections:
            self._state.all_closed.set()
        if (running := self._running) is not None:
            running.disconnect()
        self._flow.resume_writing()
        del self._parser  # it refers to this object

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        self._cancel_keep_alive()
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
        self._flow.pause_writing()
        if self._stall is None:
            self._stall = self._loop.call_later(self._limits.send_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._flow.resume_writing()
        self._end_stall()

    # -- called by the parser ----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._is_reading = self._has_begun = self._has_advanced = True
        self._has_headers = False
        self._head_bytes = 0
        self._deadline_is_of_body = None  # `_watch` will set a new deadline

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._has_advanced = True
        self._head_bytes += len(url)
        if len(self._url) > MAX_URL_BYTES:
            self._fail(414, f"the request's path is longer than {MAX_URL_BYTES} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_advanced = True
        self._head_bytes += len(name) + len(value) + 4
        self._check_head()
        if not self._has_headers:  # trailers are ignored
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._has_advanced = True
        if self._parser.should_upgrade():
            return  # `_feed` parses this message again
        if self._parser.get_http_version() not in ("1.1", "1.0"):
            self._fail(400, "only HTTP/1.1 is supported")
        self._check_host()
        self._check_coding()
        self.cycle = cycle = self._new_cycle()
        self._has_headers = True  # from here on `cycle` is this message's
        is_first = self._running is None
        self._cycles.append(cycle)
        if is_first:
            self._start(cycle)
            return
        self._waiting.append(cycle)
        self._flow.resume_reading()  # otherwise the end of the connection would go unnoticed
        if len(self._waiting) > MAX_PIPELINED:
            self._fail(400, f"over {MAX_PIPELINED} pipelined requests: read responses first")

    def on_chunk_header(self) -> None:
        self._has_advanced = True

    def on_body(self, body: bytes) -> None:
        self._has_advanced = True
        cycle = self.cycle
        assert cycle is not None, "its headers were complete"
        if len(cycle.body) > MAX_UNREAD_BYTES and self._running not in (cycle, None):
            self._fail(400, "a pipelined request is too large")
        if not cycle.response_complete:
            cycle.feed(body)
            if len(cycle.body) > MAX_UNREAD_BYTES:
                self._flow.pause_reading()

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return
        self._is_reading = False
        self._has_advanced = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.end_body()
        if self._closes_after_body:
            self.transport.close()
            raise httptools.HttpParserError("the connection is closed")

    # -- called by the server and by responses -----------------------------------------------------

    def _on_response_complete(self) -> None:
        if not self.transport.is_closing():
            self._flow.resume_reading()
            if self._waiting:
                self._start(self._waiting.popleft())
            else:
                self._start_keep_alive()
        if self._is_deaf and self._refusal is not None and self._running is None:
            self._cancel_keep_alive()
            if not self.transport.is_closing():
                self._send_error(*self._refusal)
        elif self._is_reading and self._has_begun:
            self._cancel_keep_alive()  # the next message has its own deadline

    def shutdown(self) -> None:
        """Close after the running response."""
        if self._is_response_early:
            self._closes_after_body = True
        elif self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _running(self) -> RequestCycle | None:
        """The request whose response comes next."""
        while self._cycles and self._cycles[0].response_complete:
            self._cycles.popleft()
        return self._cycles[0] if self._cycles else None

    @property
    def _is_response_early(self) -> bool:
        """Whether a request got its whole response before it was read to its end."""
        is_complete = self.cycle is not None and self.cycle.response_complete
        return self._is_reading and self._has_headers and is_complete

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # A request that ends the connection still gets its response if others follow it.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _new_cycle(self) -> RequestCycle:
        url = httptools.parse_url(self._url)
        http_version = self._parser.get_http_version()
        path = url.path.decode("ascii")
        server, client = _addresses(self.transport)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": http_version,
            "method": self._parser.get_method().decode("ascii"),
            "scheme": "https" if self.transport.get_extra_info("sslcontext") else "http",
            "path": unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
            "root_path": "",
            "headers": self._headers,
            "server": server,
            "client": client,
        }
        keeps_alive = http_version != "1.0" and self._parser.should_keep_alive()
        expected = [value.lower() for name, value in self._headers if name == b"expect"]
        cycle = RequestCycle(
            scope,
            self.transport,
            self._flow,
            default_headers=self._state.default_headers,
            keep_alive=keeps_alive and not self._state.is_draining,
            expects_continue=b"100-continue" in expected,
            logs_access=self._state.logs_access,
            close=self._close_after_response,
            on_complete=self._on_response_complete,
        )
        scope["extensions"] = {CHUNK_WRITER: cycle.write_chunk}
        return cycle

    def _start(self, cycle: RequestCycle) -> None:
        task = self._loop.create_task(cycle.run(self._state.app))
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

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
                return self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._plain_head() + data[upgrade.args[0] :]
                self._parser = self._new_parser()

    def _plain_head(self) -> bytes:
        """Return the head of this message without the offer to upgrade."""
        if self._parser.get_method() == b"CONNECT":
            self._fail(405, "this server is not a proxy")
        version = self._parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self._parser.get_method(), self._url, version)]
        lines += [b"%b: %b" % field for field in self._headers if field[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _check_host(self) -> None:
        # There must be one Host header, and a URL as target must agree with it; otherwise a proxy
        # could check one host and `check_host` another. Only the URL's path is kept.
        hosts = [value.strip().lower() for name, value in self._headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and self._parser.get_http_version() == "1.1"):
            self._fail(400, f"an HTTP/1.1 request needs one Host header, not {len(hosts)}")
        if self._url.startswith((b"/", b"*")):
            return
        target = urlsplit(self._url)
        if target.scheme not in _DEFAULT_PORTS:
            self._fail(400, "the request's target must be a path, or an http or https URL")
        port = _DEFAULT_PORTS[target.scheme]
        host = target.netloc.lower().removesuffix(port)
        if [value.removesuffix(port) for value in hosts] != [host]:
            self._fail(400, "the request's target and its Host header name different hosts")
        self._url = (target.path or b"/") + (target.query and b"?" + target.query)

    def _check_coding(self) -> None:
        # The parser accepts any coding as long as the last one is "chunked".
        codings = [value for name, value in self._headers if name == b"transfer-encoding"]
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
                self._start_keep_alive()
        elif self._deadline is None or self._deadline_is_of_body is not self._has_headers:
            self._cancel_deadline()
            limits = self._limits
            seconds = limits.body_timeout_s if self._has_headers else limits.header_timeout_s
            self._deadline_is_of_body = self._has_headers
            self._deadline = self._loop.call_later(seconds, self._on_deadline)

    def _start_keep_alive(self) -> None:
        self._cancel_keep_alive()
        seconds = self._limits.keep_alive_timeout_s
        self._keep_alive = self._loop.call_later(seconds, self.transport.close)

    def _cancel_keep_alive(self) -> None:
        if self._keep_alive is not None:
            self._keep_alive.cancel()
            self._keep_alive = None

    def _on_deadline(self) -> None:
        self._deadline = None
        if self._flow.read_paused:  # the client waits for the server
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
        self._flow.resume_reading()
        running = self._running
        is_within_body = self._is_reading and self._has_headers
        if is_within_body and self._waiting and self._waiting[-1] is self.cycle:
            self._waiting.pop()  # its endpoint is never called
            self._cycles.pop()
        if running is None:
            self._send_error(status, message)
        elif is_within_body and self.cycle is running:
            running.disconnect()
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
            self._deadline = self._loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()


def _addresses(transport: asyncio.Transport) -> tuple[object, object]:
    """The server's and the client's (host, port); of a Unix socket (path, None) and None."""
    sock = transport.get_extra_info("socket")
    name = sock.getsockname()
    server = (name[0], name[1]) if isinstance(name, tuple) else (name, None)
    try:
        peer = sock.getpeername()
    except OSError:  # it has gone
        peer = None
    return server, (peer[0], peer[1]) if isinstance(peer, tuple) else None
