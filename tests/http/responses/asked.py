"""The app as its clients see it, without a socket; and an engine that answers as it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from nanocore.http.app import App
from nanocore.http.server_settings import AppSettings
from nanocore.protocol.codec import unpack_int32
from nanocore.protocol.messages import Event, FinishReason, Submit
from tests.client.fake_engine import FakeEngine, connected, welcome_message
from tests.tiny_models import write_byte_tokenizer

TEMPLATE = """\
{%- if tools %}{{- 'tools: <tool_call> ' + tools | tojson + '\\n' }}{% endif %}
{%- for m in messages %}{{- m.role + ': ' }}
{%- if m.reasoning_content %}{{- '(' + m.reasoning_content + ')' }}{% endif %}{{- m.content }}
{%- for c in m.tool_calls or [] %}{{- '<' + c.function.name + c.function.arguments | tojson + '>' }}
{%- endfor %}{{- '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}
{%- if enable_thinking %}{{- '<think>\\n' }}{% endif %}{% endif %}
{#- </think> #}"""
ABLE = replace(welcome_message(), capabilities=["structured_outputs"])


class Reply:
    """status, headers and body of an answer."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""

    def json(self) -> Any:
        """The body's value."""
        return json.loads(self.body)

    def events(self) -> list[dict[str, Any]]:
        """Of a stream."""
        return list(sent_events(self.body))


def sent_events(body: bytes) -> Iterator[dict[str, Any]]:
    """Each named as its type says."""
    for block in body.decode().split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        yield event


class Asked:
    """An app and its engine."""

    def __init__(self, app: App, engine: FakeEngine) -> None:
        self.app, self.engine = app, engine
        self.prompts: list[str] = []
        self.submits: list[Submit] = []

    async def request(self, method: str, path: str, body: Any = None) -> Reply:
        """What it answers by itself."""
        reply = Reply()
        is_over = asyncio.Event()
        waiting = [
            {"type": "http.request", "body": b"" if body is None else json.dumps(body).encode()}
        ]

        async def receive() -> dict[str, Any]:
            if waiting:
                return waiting.pop()
            await is_over.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            else:
                reply.body += message["body"]
                if not message.get("more_body", False):
                    is_over.set()

        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [],
        }
        await self.app(scope, receive, send)
        return reply

    async def respond(
        self, body: dict[str, Any], *texts: str, reason: FinishReason = "stop"
    ) -> Reply:
        """The answer to a POST, when the engine answers in these pieces, a step for each."""
        assert self.app.state.client is not None
        tokenizer = await self.app.state.client.get_tokenizer()
        asking = asyncio.create_task(self.request("POST", "/v1/responses", body))
        submit = await self.engine.accept()
        self.submits.append(submit)
        self.prompts.append(tokenizer.decode(unpack_int32(submit.prompt_token_ids).tolist()))
        for text in texts:
            self.engine.output({1: tokenizer.encode(text)})
        ends = tokenizer.encode("<|end|>") if reason == "stop" else []
        self.engine.output({1: ends} if ends else {}, Event(handle=1, finish_reason=reason))
        return await asking


@asynccontextmanager
async def asked_app(
    short_path: Path, template: str = TEMPLATE, **settings: Any
) -> AsyncIterator[Asked]:
    """settings: of the app. The model thinks between <think> marks, and calls as hermes does."""
    folder = short_path / "model"
    folder.mkdir()
    write_byte_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(template)
    app = App(AppSettings(served_model_names=("m",), **settings))
    endpoint = f"ipc://{short_path}/engine.sock"
    async with connected(endpoint, ABLE, tokenizer=folder) as (engine, client):
        app.state.client = client
        yield Asked(app, engine)


def encoded(value: object) -> Any:
    """As JSON has it."""
    return json.loads(msgspec.json.encode(value))
