"""Requests of one client reach its engine in the order in which they were made."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nanocore.client import AsyncEngineClient, SamplingParams
from nanocore.client.chat.chat_messages import LONG_CHARS
from nanocore.client.tokenizer import MAX_QUICK_CHARS, Tokenizer
from nanocore.http.app import App
from nanocore.http.server_settings import AppSettings
from nanocore.protocol.messages import Submit, Welcome
from tests.client.fake_engine import NO_TEXT, FakeEngine, connected, welcome_message
from tests.client.running import PATIENCE_S
from tests.http.asgi import Connection, scope, turns

QUICK = "quick"
SLOW = "slow" + "w" * MAX_QUICK_CHARS
LONG = "slow" + "w" * LONG_CHARS
ONE = SamplingParams(max_tokens=1)
Ask = Callable[[AsyncEngineClient, str], Coroutine[Any, Any, object]]


async def _chat(client: AsyncEngineClient, text: str) -> None:
    async for _ in client.chat([{"role": "user", "content": text}], ONE):
        pass


async def _generate(client: AsyncEngineClient, text: str) -> None:
    async for _ in client.generate(text, ONE):
        pass


async def _post(client: AsyncEngineClient, path: str, body: bytes) -> None:
    app = App(AppSettings())
    app.state.client = client
    connection = Connection(body)
    await app(scope(path=path, host="localhost"), connection.receive, connection.send)


def _http(path: str, body: str) -> Ask:
    return lambda client, text: _post(client, path, (body % f'"{text}"').encode())


ASKS: dict[str, Ask] = {
    "generate": _generate,
    "chat": _chat,
    "complete": lambda client, text: client.complete(text, ONE),
    "/v1/completions": _http("/v1/completions", '{"prompt": %s}'),
    "/v1/completions, several": _http("/v1/completions", '{"prompt": ["a", %s]}'),
    "/v1/embeddings": _http("/v1/embeddings", '{"input": %s}'),
    "/v1/chat/completions": _http(
        "/v1/chat/completions", '{"messages": [{"role": "user", "content": %s}]}'
    ),
    "/v1/messages": _http(
        "/v1/messages", '{"max_tokens": 1, "messages": [{"role": "user", "content": %s}]}'
    ),
    "/v1/responses": _http("/v1/responses", '{"input": %s}'),
}


@pytest.fixture
def may_encode(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, what says "slow" is not tokenized."""
    event, encode = threading.Event(), Tokenizer.encode

    def encode_when_allowed(self: Tokenizer, text: str, *args: Any, **fields: Any) -> list[int]:
        if "slow" in text:
            event.wait(PATIENCE_S)
        return encode(self, text, *args, **fields)

    monkeypatch.setattr(Tokenizer, "encode", encode_when_allowed)
    return event


def _roomy() -> Welcome:
    welcome = welcome_message()
    model = replace(welcome.model, max_model_len=2 * LONG_CHARS)
    return replace(welcome, model=model, capabilities=[*welcome.capabilities, "embeddings"])


async def _next_is_long(engine: FakeEngine) -> bool:
    return len((await engine.receive(Submit)).prompt_token_ids) // 4 > MAX_QUICK_CHARS


@pytest.mark.parametrize("slow", ASKS)
@pytest.mark.parametrize("second", ["ids", "chat"])
async def test_a_request_waits_for_one_that_was_made_before_it(
    endpoint: str, tokenizer_folder: Path, may_encode: threading.Event, slow: str, second: str
) -> None:
    async with connected(endpoint, _roomy(), tokenizer=tokenizer_folder) as (engine, client):
        await client.get_tokenizer()
        tasks = [asyncio.create_task(ASKS[slow](client, SLOW))]
        await turns()
        if second == "ids":
            tasks.append(asyncio.create_task(client.complete([1], NO_TEXT)))
        else:
            tasks.append(asyncio.create_task(ASKS[second](client, QUICK)))
        # The other one is rendered and tokenized meanwhile.
        await client.with_tokenizer(lambda tokenizer: tokenizer.encode(QUICK))
        await turns(20)
        may_encode.set()
        if "several" in slow:
            assert not await _next_is_long(engine)
        assert await _next_is_long(engine)
        assert not await _next_is_long(engine)
        await _leave(tasks)


@pytest.mark.parametrize("slow", ASKS)
async def test_a_long_text_holds_up_no_other_request(
    endpoint: str, tokenizer_folder: Path, may_encode: threading.Event, slow: str
) -> None:
    async with connected(endpoint, _roomy(), tokenizer=tokenizer_folder) as (engine, client):
        await client.get_tokenizer()
        tasks = [asyncio.create_task(ASKS[slow](client, LONG)) for _ in range(2)]
        await turns()
        for ask in ("generate", "chat", "/v1/completions"):
            tasks.append(asyncio.create_task(ASKS[ask](client, QUICK)))
            assert not await _next_is_long(engine)
        may_encode.set()
        await _leave(tasks)


async def test_one_that_comes_as_the_tokenizer_is_loaded_does_not_overtake_those_that_wait(
    endpoint: str, tokenizer_folder: Path
) -> None:
    """At whichever turn of the event loop it comes."""

    for num_turns in range(8):
        async with connected(endpoint, _roomy(), tokenizer=tokenizer_folder) as (engine, client):
            assert client._manager is not None
            tokenizer = client._manager.last.tokenizer
            tasks = [asyncio.create_task(client.complete("a", ONE, request_id="first"))]
            await turns()
            assert tokenizer._loading is not None
            while not tokenizer._loading.done():
                await asyncio.sleep(0)
            await turns(num_turns)
            tasks.append(asyncio.create_task(client.complete("b", ONE, request_id="second")))
            order = [(await engine.receive(Submit)).request_id for _ in tasks]
            assert order == ["first", "second"]
            await _leave(tasks)


async def test_one_that_fails_or_leaves_holds_up_nobody(
    endpoint: str, tokenizer_folder: Path, may_encode: threading.Event
) -> None:
    async with connected(endpoint, _roomy(), tokenizer=tokenizer_folder) as (engine, client):
        leaving = asyncio.create_task(client.complete(SLOW, ONE))
        failing = asyncio.create_task(client.complete(SLOW + "\ud800", ONE))
        last = asyncio.create_task(client.complete("c", ONE, request_id="last"))
        await turns()
        leaving.cancel()
        may_encode.set()
        assert (await engine.receive(Submit)).request_id == "last"
        await _leave([leaving, failing, last])


async def _leave(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
