"""A server of OpenAI's API whose answers a test writes, byte by byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

DONE = b"data: [DONE]\n\n"
Script = Callable[[dict[str, Any]], "tuple[int, Sequence[bytes]]"]


@dataclass
class FakeServer:
    """requests: (path, headers, body) of each that came. models_status: of /v1/models.

    location: where all requests are redirected to, if it is set. model: more fields of the model.
    metrics: texts of /metrics, one after the other; then, as without, that path does not exist.
    """

    url: str
    script: Script
    requests: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    models_status: int = 200
    location: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    metrics: list[str] = field(default_factory=list)


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def completion(texts: Sequence[str], num_prompt_tokens: int | None = 5) -> list[bytes]:
    """The events of a completion, an event for each text; without usage if there is no number."""
    choices: list[dict[str, Any]] = [{"index": 0, "text": text} for text in texts]
    choices[-1]["finish_reason"] = "length"
    events = [event({"choices": [choice]}) for choice in choices]
    if num_prompt_tokens is not None:
        usage = {"prompt_tokens": num_prompt_tokens, "completion_tokens": 2 * len(texts)}
        events.append(event({"choices": [], "usage": usage}))
    return [*events, DONE]


def chat(texts: Sequence[str]) -> list[bytes]:
    """The events of a chat completion: a role, texts, an end and the usage."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": text} for text in texts]
    events = [event({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
    events.append(event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
    usage = {"prompt_tokens": 7, "completion_tokens": len(texts)}
    return [*events, event({"choices": [], "usage": usage}), DONE]


@contextmanager
def serving(script: Script) -> Iterator[FakeServer]:
    """Serve in threads of this process. script: (status, pieces of the body) for a request's."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                text = server.metrics.pop(0) if server.metrics else None
                self._answer(404 if text is None else 200, [(text or "").encode()])
                return
            models = {"data": [{"id": "fake", "root": "a/fake", **server.model}]}
            self._answer(server.models_status, [json.dumps(models).encode()])

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            server.requests.append(
                (self.path, {k.lower(): v for k, v in self.headers.items()}, body)
            )
            self._answer(*server.script(body))

        def _answer(self, status: int, pieces: Sequence[bytes]) -> None:
            is_moved = server.location not in ("", self.path)
            self.send_response(307 if is_moved else status)
            if is_moved:
                self.send_header("Location", server.location)
            self.end_headers()  # HTTP/1.0: the body ends with the connection
            for piece in pieces:
                self.wfile.write(piece)
                self.wfile.flush()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        server = FakeServer(f"http://127.0.0.1:{listening.server_address[1]}", script)
        thread = Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            listening.shutdown()
            thread.join()
