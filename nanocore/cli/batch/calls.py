"""Calls to an HTTP application: the one in this process, or one that relays to a server."""

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


class _Call:
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


async def ask(app: AsgiApp, path: str, body: bytes) -> CallResponse:
    """POST a body; cancelling the call aborts the request."""
    call = _Call(body)
    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await app(scope, call.receive, call.send)
    retry_after = call.headers.get(b"retry-after", b"").decode()
    return CallResponse(
        call.status,
        call.headers[b"x-request-id"].decode(),
        call.body,
        float(retry_after) if retry_after.isdecimal() else None,  # it may be a date
    )


@asynccontextmanager
async def relay(url: str, api_key: str) -> AsyncIterator[AsgiApp]:
    """Yield an application that passes calls on to a server.

    A call that does not reach the server is a 503, so that it is retried. api_key: or ''.
    """
    import aiohttp

    from nanocore.bench.sse import within_origin

    headers = {"content-type": "application/json"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        told = [(b"x-request-id", b"")]
        try:
            path, body = scope["path"], (await receive())["body"]
            async with session.post(f"{url}{path}", data=body) as response:
                status, content = response.status, await response.read()
                told += [
                    (name.encode(), value.encode())
                    for name in ("x-request-id", "retry-after")
                    if (value := response.headers.get(name))
                ]
        except (aiohttp.ClientError, OSError) as error:
            status, content = 503, str(error).encode()
        if not _is_json(content):
            text = shorten(content.decode(errors="replace")) or f"HTTP {status} without a body"
            content = msgspec.json.encode({"error": {"message": text}})
            status = status if status >= 400 else 502
        await send({"type": "http.response.start", "status": status, "headers": told})
        await send({"type": "http.response.body", "body": content})

    async with aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0),  # the runner limits concurrency
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        trace_configs=[within_origin()],
    ) as session:
        yield app


def _is_json(content: bytes) -> bool:
    try:
        msgspec.json.decode(content)
    except (ValueError, RecursionError):
        return False
    return True
