"""Calls to the HTTP application in this process, or to a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, TypeAlias

import msgspec

from nanocore.http.exchange import Receive, Scope, Send
from nanocore.protocol.errors import shorten

CONNECT_TIMEOUT_S: Final = 10.0
AsgiApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


class CallResponse(msgspec.Struct, frozen=True):
    """retry_after_s: the value of Retry-After, if present."""

    status: int
    request_id: str
    body: bytes
    retry_after_s: float | None


class _AsgiCall:
    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._is_over = asyncio.Event()
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._is_over.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
            return
        self.body += message["body"]
        if not message.get("more_body", False):
            self._is_over.set()


Call: TypeAlias = Callable[[str, bytes], Awaitable[CallResponse]]
"""POSTs a body to a path; cancelling the call aborts the request."""


async def ask(app: AsgiApp, path: str, body: bytes) -> CallResponse:
    """Call an application; see `Call`."""
    call = _AsgiCall(body)
    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await app(scope, call.receive, call.send)
    headers = {name.decode(): value.decode("latin-1") for name, value in call.headers.items()}
    return _response(call.status, call.body, headers)


def _response(status: int, body: bytes, headers: Mapping[str, str]) -> CallResponse:
    wait = headers.get("retry-after", "")
    wait_s = float(wait) if wait.isdecimal() else None  # it may be a date
    return CallResponse(status, headers.get("x-request-id", ""), body, wait_s)


@asynccontextmanager
async def relay(url: str, api_key: str) -> AsyncIterator[Call]:
    """Yield calls to a server.

    A call that does not reach the server is a 503, so that it is retried. api_key: or ''.
    """
    import aiohttp

    from nanocore.bench.sse import within_origin

    headers = {"content-type": "application/json"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"

    async def call(path: str, body: bytes) -> CallResponse:
        told: Mapping[str, str] = {}
        try:
            async with session.post(f"{url}{path}", data=body) as response:
                status, content, told = response.status, await response.read(), response.headers
        except (aiohttp.ClientError, OSError) as error:
            status, content = 503, str(error).encode()
        if not _is_json(content):
            text = shorten(content.decode(errors="replace")) or f"HTTP {status} without a body"
            content = msgspec.json.encode({"error": {"message": text}})
            status = status if status >= 400 else 502
        return _response(status, content, told)

    async with aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0),  # the runner limits concurrency
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        trace_configs=[within_origin()],
    ) as session:
        yield call


def _is_json(content: bytes) -> bool:
    try:
        msgspec.json.decode(content)
    except (ValueError, RecursionError):
        return False
    return True
