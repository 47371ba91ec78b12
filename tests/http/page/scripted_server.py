"""A server with the real page, whose answers are what a test has written down.

It listens at a port of loopback that is free, in a thread of its own. A stream waits at a `Gate`
until the test opens it, so what the page shows in between can be looked at for as long as wanted.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import uvicorn

from nanocore.http.app import App
from nanocore.http.server_settings import AppSettings

MODEL = "scripted"
PAGE_PATHS = ("/", "/page/")


class Gate:
    """Holds a stream until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    async def passed(self) -> None:
        await asyncio.to_thread(self._open.wait, 60)


class Drop:
    """The connection ends without an end of the answer."""


Part: TypeAlias = dict[str, Any] | bytes | Gate | Drop
"""A chunk's delta, bytes as they are, and what is above."""


class Refusal:
    """An answer that is an error. retry_after: as its header has it. fields: the error's others."""

    def __init__(
        self, status: int, message: str, retry_after: int | str | None = None, **fields: Any
    ) -> None:
        self.status = status
        self.body = json.dumps({"error": {"message": message, **fields}}).encode()
        later = [] if retry_after is None else [(b"retry-after", str(retry_after).encode())]
        self.headers = later


class Whole:
    """An answer that is no stream, though it is no error."""

    def __init__(self, kind: str, body: str) -> None:
        self.kind = kind.encode()
        self.body = body.encode()


def end(finish_reason: str = "stop", **usage: Any) -> list[Part]:
    """How a whole stream ends. usage: its fields, beside those that it has anyway."""
    counts = {
        "prompt_tokens": 20,
        "completion_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 16},
        **usage,
    }
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason}]}
    return [
        b"data: " + json.dumps(last).encode() + b"\n\n",
        b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\ndata: [DONE]\n\n",
    ]


class ScriptedServer:
    """url: the page's. bodies: of the chat requests, as they came. live: what /live answers.

    live_asked: the queries of /live, as they came. left: set once a chat request was left.
    model: its name, behind a folder's. model_fields: more of it in /v1/models.
    key: that requests need; None: they need none.
    models_after: so many refusals of /v1/models come first.
    key_status: of the answer to another key.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._app = App(AppSettings())
        self.forget()

    def forget(self) -> None:
        """Be as at the start."""
        self.key: str | None = None
        self.key_status = 401
        self.models_after = 0
        self.model = MODEL
        self.model_fields: dict[str, Any] = {}
        self.bodies: list[dict[str, Any]] = []
        self.live: dict[str, Any] | Refusal = Refusal(503, "the model is being loaded", 5)
        self.live_asked: list[str] = []
        self.left = threading.Event()
        self._answers: deque[Sequence[Part] | Refusal | Whole] = deque()

    def answer_with(self, *answers: Sequence[Part] | Refusal | Whole) -> None:
        """What the next chat requests get."""
        self._answers.extend(answers)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """The ASGI application."""
        path = scope["path"]
        if path.startswith(PAGE_PATHS[1]) or path == PAGE_PATHS[0]:
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"authorization")
        if self.key_status != 401 and given not in (None, f"Bearer {self.key}".encode()):
            refusal = Refusal(self.key_status, f"not with this key: {self.key_status}")
            await _reply(send, refusal.status, refusal.body)
        elif self.key is not None and given != f"Bearer {self.key}".encode():
            await App(AppSettings(api_keys=(self.key,)))(scope, receive, send)
        elif path == "/v1/models" and self.models_after > 0:
            self.models_after -= 1
            loading = Refusal(503, "the model is being loaded", 1)
            await _reply(send, loading.status, loading.body, loading.headers)
        elif path == "/v1/models":
            model = {"id": f"/models/{self.model}", "max_model_len": 2048, **self.model_fields}
            await _reply(send, 200, json.dumps({"data": [model]}).encode())
        elif path == "/live":
            self.live_asked.append(scope["query_string"].decode())
            answer = self.live
            if isinstance(answer, Refusal):
                await _reply(send, answer.status, answer.body, answer.headers)
            else:
                await _reply(send, 200, json.dumps(answer).encode())
        elif path == "/v1/chat/completions":
            await self._chat(receive, send)
        else:
            await _reply(send, 404, b"{}")

    async def _chat(self, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message.get("more_body", False)
        self.bodies.append(json.loads(body))
        answer = self._answers.popleft()
        if isinstance(answer, Refusal):
            await _reply(send, answer.status, answer.body, answer.headers)
            return
        if isinstance(answer, Whole):
            await _start(send, 200, answer.kind, [])
            await send({"type": "http.response.body", "body": answer.body})
            return
        await _start(send, 200, b"text/event-stream", [])
        leaving = asyncio.ensure_future(receive())
        for part in answer:
            if isinstance(part, Gate):
                passing = asyncio.ensure_future(part.passed())
                await asyncio.wait([leaving, passing], return_when=asyncio.FIRST_COMPLETED)
                if leaving.done():
                    self.left.set()
                    part.open()
                    return
            elif isinstance(part, Drop):
                raise ConnectionError("as the script says")
            else:
                await send({"type": "http.response.body", "body": _chunk(part), "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        leaving.cancel()


def _chunk(part: dict[str, Any] | bytes) -> bytes:
    if isinstance(part, bytes):
        return part
    choice = {"index": 0, "delta": part, "finish_reason": None}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


async def _start(send: Any, status: int, kind: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    headers = [(b"content-type", kind), *headers]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _reply(
    send: Any, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    await _start(send, status, b"application/json", list(headers))
    await send({"type": "http.response.body", "body": body})


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    """One that runs while the block does."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        scripted = ScriptedServer(f"http://127.0.0.1:{listening.getsockname()[1]}/")
        config = uvicorn.Config(scripted, log_level="critical", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield scripted
        finally:
            server.should_exit = True
            server.force_exit = True
            thread.join()
