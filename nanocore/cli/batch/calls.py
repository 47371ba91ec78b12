"""Calls to the HTTP application in this process, without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import msgspec

from nanocore.http.exchange import Receive, Scope, Send

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
    retry_after = call.headers.get(b"retry-after")
    return CallResponse(
        call.status,
        call.headers[b"x-request-id"].decode(),
        call.body,
        None if retry_after is None else float(retry_after),
    )
