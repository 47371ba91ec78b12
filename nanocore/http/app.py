"""The ASGI application: who is asked, by which method and path, and who may ask."""

from __future__ import annotations

import hmac
import logging
import re
import uuid
from typing import Final

from nanocore.http.errors import RETRY_LATER_S, HttpError, anthropic_body, unavailable
from nanocore.http.exchange import Disconnected, Exchange, Receive, Scope, Send
from nanocore.http.request_record import RequestRecord
from nanocore.http.route import Route
from nanocore.http.routes import find_route
from nanocore.http.settings import AppSettings
from nanocore.http.sites import check_site
from nanocore.http.state import ServerState
from nanocore.protocol.errors import NanocoreError

_logger = logging.getLogger(__name__)
_TRACE_HEADERS: Final = ("traceparent", "tracestate")
_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")


class App:
    """Belongs to the event loop in which it gets its first request. state: all requests'."""

    def __init__(self, settings: AppSettings) -> None:
        self.state = ServerState(settings)
        self._keys = [key.encode() for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; the server calls it."""
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is served, not {scope['type']}")
        exchange = Exchange(scope, receive, send, self.state, _new_id(scope))
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
            exchange.note_disconnect()
        finally:
            self.state.freed_memory.note(exchange.num_body_bytes)
            if exchange.record is not None:
                self._write(exchange, exchange.record)

    async def _serve(self, exchange: Exchange, is_allowed_origin: bool) -> None:
        """Raises HttpError: what the answer is instead. Disconnected: there is nobody to answer."""
        scope = exchange.scope
        try:
            route, exchange.path_id = find_route(scope["method"], scope["path"])
            if route.is_anthropic:
                exchange.error_body = anthropic_body
                exchange.reply_headers[b"request-id"] = exchange.request_id.encode()
            if route.operation is not None and self.state.spans is not None:
                exchange.record = RequestRecord(route.operation, exchange.request_id)
            self._check(exchange, route, is_allowed_origin)
            await route.endpoint(exchange)
        except (HttpError, Disconnected):
            raise
        except NanocoreError as error:
            raise exchange.http_error(error) from error
        except Exception:
            failure = HttpError(500, "the server has failed, and its log says how")
            if exchange.has_started:
                exchange.note_error(failure)
                raise
            about = {"request_id": exchange.request_id}
            _logger.exception("a bug: %s %s failed", scope["method"], scope["path"], extra=about)
            raise failure from None

    def _write(self, exchange: Exchange, record: RequestRecord) -> None:
        assert self.state.spans is not None, "it asks for records"
        found = {name: exchange.header(name.encode()) for name in _TRACE_HEADERS}
        parent = {name: value.decode("latin-1") for name, value in found.items() if value}
        self.state.spans.write(record, exchange.scope.get("server"), parent)

    def _check(self, exchange: Exchange, route: Route, is_allowed_origin: bool) -> None:
        """Who asks, and whether we serve.

        Raises:
            HttpError: no.
        """
        if not route.is_open:
            self._check_client(exchange, is_allowed_origin)
        if route.is_work and self.state.is_draining:
            raise unavailable(
                "the server is shutting down: ask another one, or later", RETRY_LATER_S
            )

    def _check_client(self, exchange: Exchange, is_allowed_origin: bool) -> None:
        """Whether it may ask: by a key, or where there are none, by where it comes from.

        Raises:
            HttpError: no.
        """
        allowed_hosts = self.state.settings.allowed_hosts
        if not self._keys:
            if allowed_hosts is not None:
                origin = None if is_allowed_origin else exchange.header(b"origin")
                check_site(exchange.headers(b"host"), origin, allowed_hosts)
        elif not self._has_key(exchange):
            raise HttpError(
                401,
                "no valid API key: send one as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                "invalid_api_key",
                headers={b"www-authenticate": b"Bearer"},
            )

    def _has_key(self, exchange: Exchange) -> bool:
        kind, _, bearer = (exchange.header(b"authorization") or b"").partition(b" ")
        given = [(exchange.header(b"x-api-key") or b"").strip()]
        if kind.lower() == b"bearer":
            given.append(bearer.strip())
        # All of them: how long it takes tells nothing.
        return True in [hmac.compare_digest(key, one) for key in self._keys for one in given]

    def _allow_origin(self, exchange: Exchange) -> bool:
        """Whether it comes from a web page that may call from another host."""
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


def _new_id(scope: Scope) -> str:
    """As the client calls its request, if that can stand in a header; else one of ours."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            given: str = value.decode()
            return given
    return uuid.uuid4().hex
