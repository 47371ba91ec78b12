"""The ASGI application: routing, authentication, CORS, and errors as responses."""

from __future__ import annotations

import hmac
import logging
import re
import uuid
from typing import Final

from nanocore.http.exchange import Disconnected, Exchange, Receive, Scope, Send
from nanocore.http.host_check import check_host
from nanocore.http.http_errors import RETRY_LATER_S, HttpError, anthropic_body, unavailable
from nanocore.http.request_record import DISCONNECTED
from nanocore.http.routes import Route, find_route
from nanocore.http.server_settings import AppSettings
from nanocore.http.state import ServerState
from nanocore.protocol.errors import NanocoreError

_logger = logging.getLogger(__name__)
_TRACE_HEADERS: Final = ("traceparent", "tracestate")
_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")


class App:
    """The application. It belongs to the event loop of its first request.

    state: shared by all requests.
    """

    def __init__(self, settings: AppSettings) -> None:
        self.state = ServerState(settings)
        self._keys = [key.encode() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; called by the ASGI server."""
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is served, not {scope['type']}")
        exchange = Exchange(scope, receive, send, self.state, _request_id(scope))
        exchange.reply_headers[b"x-request-id"] = exchange.request_id.encode()
        is_allowed = self._allow_origin(exchange)
        if is_allowed and scope["method"] == "OPTIONS":
            await exchange.reply(204, b"")
            return
        if exchange.header(b"anthropic-version") is not None:
            exchange.error_body = anthropic_body
        try:
            await self._serve(exchange, is_allowed)
        except HttpError as error:
            exchange.note_error(error)
            exchange.reply_headers.update(error.headers)
            await exchange.reply(error.status, exchange.error_body(error))
        except Disconnected:
            exchange.record.error = DISCONNECTED
        finally:
            self.state.memory.note(exchange.num_body_bytes)
            if self.state.spans is not None and exchange.record.operation is not None:
                found = {name: exchange.header(name.encode()) for name in _TRACE_HEADERS}
                parent = {name: value.decode("latin-1") for name, value in found.items() if value}
                self.state.spans.write(exchange.record, scope.get("server"), parent)

    async def _serve(self, exchange: Exchange, is_allowed_origin: bool) -> None:
        scope = exchange.scope
        try:
            route, exchange.path_id = find_route(scope["method"], scope["path"])
            if route.is_anthropic:
                exchange.error_body = anthropic_body
                exchange.reply_headers[b"request-id"] = exchange.request_id.encode()
            exchange.record.operation = route.operation
            self._check(exchange, route, is_allowed_origin)
            await route.endpoint(exchange)
        except (HttpError, Disconnected):
            raise
        except NanocoreError as error:
            raise exchange.http_error(error) from error
        except Exception:
            failure = HttpError(500, "internal server error: see the server's log")
            if exchange.has_started:
                # Too late for a status: the server cuts the connection, and logs the traceback.
                exchange.note_error(failure)
                raise
            about = {"request_id": exchange.request_id}
            _logger.exception("a bug: %s %s failed", scope["method"], scope["path"], extra=about)
            raise failure from None

    def _check(self, exchange: Exchange, route: Route, is_allowed_origin: bool) -> None:
        """Raise HttpError if this client may not use the route, or the server is draining."""
        allowed_hosts = self.state.settings.allowed_hosts
        if route.is_open:
            pass
        elif not self._keys:
            if allowed_hosts is not None:
                origin = None if is_allowed_origin else exchange.header(b"origin")
                check_host(exchange.headers(b"host"), origin, allowed_hosts)
        elif not self._has_key(exchange):
            raise HttpError(
                401,
                "no valid API key: send one as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                "invalid_api_key",
                headers={b"www-authenticate": b"Bearer"},
            )
        if route.is_work and self.state.is_draining:
            raise unavailable(
                "the server is shutting down: use another one, or retry later", RETRY_LATER_S
            )

    def _has_key(self, exchange: Exchange) -> bool:
        kind, _, bearer = (exchange.header(b"authorization") or b"").partition(b" ")
        given = [(exchange.header(b"x-api-key") or b"").strip()]
        if kind.lower() == b"bearer":
            given.append(bearer.strip())
        # A list, so that all are compared: the time taken does not reveal which key matched.
        return True in [hmac.compare_digest(key, one) for key in self._keys for one in given]

    def _allow_origin(self, exchange: Exchange) -> bool:
        """Set the CORS headers if the request is from an allowed origin; return whether it is."""
        allowed = self.state.settings.allowed_origins
        origin = exchange.header(b"origin")
        if origin is None or not allowed:
            return False
        exchange.reply_headers[b"vary"] = b"origin"
        if "*" not in allowed and origin.decode("latin-1").lower() not in allowed:
            return False
        exchange.reply_headers[b"access-control-allow-origin"] = origin
        exchange.reply_headers[b"access-control-allow-headers"] = b"*, authorization"
        exchange.reply_headers[b"access-control-allow-methods"] = b"GET, POST, DELETE"
        exchange.reply_headers[b"access-control-expose-headers"] = b"*"
        return True


def _request_id(scope: Scope) -> str:
    """Return the client's x-request-id if it is a valid header value, or a new id."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            given: str = value.decode()
            return given
    return uuid.uuid4().hex
