"""Leaving a request, in whatever way: the engine hears of it exactly once, and never in vain."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from nanocore.client import AsyncEngineClient, SamplingParams
from nanocore.protocol.messages import Abort, Event, Message, Ping, Pong, Submit
from tests.client.fake_engine import NO_TEXT, FakeEngine, connected
from tests.client.fake_socket import FakeSocket


async def _expect_silence(engine: FakeEngine, client: AsyncEngineClient) -> None:
    """Assert that the client has nothing more to say: what it says next is our marker."""
    marker = asyncio.create_task(client.health())
    ping = await engine.receive(Ping)
    engine.send(Pong(nonce=ping.nonce))
    await marker


async def _break(client: AsyncEngineClient) -> None:
    async for _ in client.generate([1], NO_TEXT, request_id="r"):
        break


async def _break_chat(client: AsyncEngineClient) -> None:
    async for _ in client.chat([{"role": "user", "content": "hi"}], request_id="r"):
        break


async def _fail(client: AsyncEngineClient) -> None:
    with suppress(KeyError):
        async for _ in client.generate([1], NO_TEXT, request_id="r"):
            raise KeyError("the reader's own")


@pytest.mark.parametrize("leave", [_break, _break_chat, _fail])
async def test_leaving_in_any_way_sends_one_abort(
    endpoint: str, tokenizer_folder: Path, leave: Callable[[AsyncEngineClient], Awaitable[None]]
) -> None:
    async with connected(endpoint, tokenizer=tokenizer_folder) as (engine, client):
        reading = await engine.begin(leave(client))
        engine.output({1: [10]})
        await reading
        assert (await engine.receive(Abort)).request_ids == ["r"]
        engine.output({1: [11]}, Event(handle=1, finish_reason="abort"))
        await _expect_silence(engine, client)


@pytest.mark.parametrize("accepted", [True, False])
@pytest.mark.parametrize("streaming", [True, False])
async def test_cancelling_the_task_sends_one_abort(
    endpoint: str, accepted: bool, streaming: bool
) -> None:
    async with connected(endpoint) as (engine, client):

        async def read() -> None:
            if streaming:
                async for _ in client.generate([1], NO_TEXT, request_id="r"):
                    pass
            else:
                await client.complete([1], NO_TEXT, request_id="r")

        reading = asyncio.create_task(read())
        await (engine.accept(1) if accepted else engine.receive(Message))
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert (await engine.receive(Abort)).request_ids == ["r"]
        await _expect_silence(engine, client)


@pytest.mark.parametrize("turns", range(6))
async def test_cancelling_aborts_however_soon_after_the_submit_it_comes(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket = FakeSocket()
    monkeypatch.setattr(
        "nanocore.client.connection.handshake.ClientSocket", lambda *_, **__: socket
    )

    async with AsyncEngineClient.connect("ipc:///fake", resume=False) as client:
        request = asyncio.create_task(client.complete([1], NO_TEXT, request_id="r"))
        while not isinstance(socket.messages[-1], Submit):
            await asyncio.sleep(0)
        for _ in range(turns):
            await asyncio.sleep(0)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert socket.messages[2:] == [Abort(request_ids=["r"])]


async def test_a_request_that_has_ended_is_not_aborted(endpoint: str) -> None:
    async with connected(endpoint) as (engine, client):
        request = await engine.begin(client.complete([1], NO_TEXT))
        engine.finish(1)
        await request
        await _expect_silence(engine, client)


async def test_a_stop_string_sends_one_abort_and_late_tokens_are_ignored(
    endpoint: str, tokenizer_folder: Path
) -> None:
    async with connected(endpoint, tokenizer=tokenizer_folder) as (engine, client):
        tokenizer = await client.get_tokenizer()
        params = SamplingParams(stop=["END"])
        request = await engine.begin(client.complete("x", params, request_id="r"))
        for piece in ("abE", "ND", "cd"):
            engine.output({1: tokenizer.encode(piece)})
        output = await request
        assert output.outputs[0].text == "ab"
        assert (await engine.receive(Abort)).request_ids == ["r"]
        engine.output({1: [1, 2]}, Event(handle=1, finish_reason="abort"))
        await _expect_silence(engine, client)
        assert output.outputs[0].text == "ab"


async def test_abort_by_name_ends_the_iterator_with_that_reason(endpoint: str) -> None:
    async with connected(endpoint) as (engine, client):
        request = await engine.begin(client.complete([1], NO_TEXT, request_id="r"))
        engine.output({1: [10]})
        await client.abort("r")
        assert (await engine.receive(Abort)).request_ids == ["r"]
        engine.finish(1, "abort")
        output = await request
        assert output.outputs[0].finish_reason == "abort"
        assert output.outputs[0].token_ids == [10]
        await _expect_silence(engine, client)


async def test_requests_are_left_one_by_one(endpoint: str) -> None:
    async with connected(endpoint) as (engine, client):
        kept = await engine.begin(client.complete([1], NO_TEXT, request_id="kept"))
        left = await engine.begin(client.complete([1], NO_TEXT, request_id="left"), 2)
        left.cancel()
        assert (await engine.receive(Abort)).request_ids == ["left"]
        engine.output({1: [10], 2: [20]}, Event(handle=1, finish_reason="length"))
        assert (await kept).outputs[0].token_ids == [10]
