"""HTTP without a network: a connection's two ends, and the whole app with its engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2 as httpx
import openai

from nanocore.client import AsyncEngineClient
from nanocore.http.app import App
from nanocore.http.exchange import Exchange, Scope
from nanocore.http.server_settings import AppSettings
from nanocore.http.state import ServerState
from tests.client.running import run


class Connection:
    """One request's. bodies: what was sent of the answer's body. is_slow: sends wait for `take`."""

    def __init__(self, *pieces: bytes, is_slow: bool = False) -> None:
        self._incoming = [*pieces] or [b""]
        self._event = asyncio.Event()
        self._room = asyncio.Event()
        self._is_slow = is_slow
        self.is_gone = False
        self.start: Mapping[str, Any] | None = None
        self.bodies: list[bytes] = []
        self.is_complete = False
        self.num_waits = 0

    async def receive(self) -> dict[str, Any]:
        """The next piece of the body, then the end of it all."""
        if self._incoming:
            body = self._incoming.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(self._incoming)}
        await self._event.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Mapping[str, Any]) -> None:
        """As a server's `send`: once the client is gone nothing happens any more."""
        if self._is_slow:
            self.num_waits += 1
            await self._room.wait()
            self._room.clear()
        if self.is_gone:
            return
        if message["type"] == "http.response.start":
            assert self.start is None, "an answer begins once"
            self.start = message
            return
        assert self.start is not None, "the status comes first"
        assert not self.is_complete, "nothing comes after the end"
        self.bodies.append(message["body"])
        if not message.get("more_body", False):
            self.is_complete = True
            self._event.set()

    def take(self) -> None:
        """The slow client takes what one `send` has."""
        self._room.set()

    def leave(self) -> None:
        """The client goes away."""
        self.is_gone = True
        self._event.set()
        self._room.set()

    @property
    def status(self) -> int:
        """Of the answer."""
        assert self.start is not None, "there is no answer yet"
        status: int = self.start["status"]
        return status

    @property
    def headers(self) -> dict[bytes, bytes]:
        """Of the answer."""
        assert self.start is not None, "there is no answer yet"
        return dict(self.start["headers"])

    @property
    def body(self) -> bytes:
        """All of it, so far."""
        return b"".join(self.bodies)

    @property
    def json(self) -> Any:
        """The body, read."""
        return json.loads(self.body)


def scope(method: str = "POST", path: str = "/", **headers: str) -> Scope:
    """Of a request. headers: by name, with underscores for hyphens."""
    return {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [
            (name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()
        ],
    }


def exchange(connection: Connection, state: ServerState | None = None, **headers: str) -> Exchange:
    """A request to be answered over this connection."""
    return Exchange(
        scope(**headers),
        connection.receive,
        connection.send,
        state or ServerState(AppSettings()),
        "r",
    )


async def turns(number: int = 5) -> None:
    """Let the event loop run all that is ready, so many times."""
    for _ in range(number):
        await asyncio.sleep(0)


BASE_URL = "http://test"


@asynccontextmanager
async def app_of(endpoint: str, **settings: Any) -> AsyncIterator[tuple[App, httpx.AsyncClient]]:
    """The application of the engine at this endpoint, and what sends it requests.

    A streamed answer comes when it is whole.
    """
    app = App(AppSettings(**settings))
    async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
        app.state.client = client
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url=BASE_URL) as http:
            yield app, http


def ask(endpoint: str, path: str, body: Any = None, **settings: Any) -> httpx.Response:
    """The reply to one request; GET without a body."""

    async def send() -> httpx.Response:
        async with app_of(endpoint, **settings) as (_, http):
            return await (http.get(path) if body is None else http.post(path, json=body))

    return run(send())


def openai_client(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    """OpenAI's own client, which sends its requests that way."""
    return openai.AsyncOpenAI(
        api_key="none", base_url=f"{BASE_URL}/v1", http_client=http, max_retries=0
    )
