"""A client in the wrong state, event loop or thread: it says so at once."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from typing import Any

import pytest

from nanocore.client import LLM, AsyncEngineClient, ClientStateError, EngineDeadError
from nanocore.client.base_client import BaseClient
from nanocore.protocol.messages import Bye
from tests.client.fake_engine import NO_TEXT, FakeEngine, connected
from tests.client.fake_socket import FakeSocket
from tests.client.running import run

CALLS: dict[str, Callable[[AsyncEngineClient], Any]] = {
    "generate": lambda client: anext(client.generate([1], NO_TEXT)),
    "chat": lambda client: anext(client.chat([{"role": "user", "content": "hi"}])),
    "submit": lambda client: client.submit([1]),
    "submit_chat": lambda client: client.submit_chat([{"role": "user", "content": "hi"}]),
    "complete": lambda client: client.complete([1], NO_TEXT),
    "embed": lambda client: client.embed([1]),
    "score": lambda client: client.score([1], [2]),
    "abort": lambda client: client.abort("r"),
    "get_tokenizer": lambda client: client.get_tokenizer(),
    "encode": lambda client: client.encode("hi"),
    "with_tokenizer": lambda client: client.with_tokenizer(str),
    "read_file": lambda client: client.read_file("tokenizer.json"),
    "stats": lambda client: client.stats(),
    "metrics": lambda client: client.metrics(),
    "recent_steps": lambda client: client.recent_steps(),
    "health": lambda client: client.health(),
    "reset_prefix_cache": lambda client: client.reset_prefix_cache(),
    "pause": lambda client: client.pause(),
    "resume": lambda client: client.resume(),
    "drain": lambda client: client.drain(),
}


def test_the_list_of_calls_is_complete() -> None:
    names = {
        name
        for owner in (AsyncEngineClient, BaseClient)
        for name, value in vars(owner).items()
        if callable(value) and not name.startswith("_") and name not in ("launch", "connect")
    }
    assert names == CALLS.keys() | {"close", "submit_tickets"}


async def _call(call: str, client: AsyncEngineClient) -> None:
    await CALLS[call](client)


@pytest.mark.parametrize("call", CALLS)
async def test_a_client_that_is_not_entered_or_closed_says_so(endpoint: str, call: str) -> None:
    async with connected(endpoint) as (_, client):
        await client.close()
        with pytest.raises(ClientStateError, match="inside `async with`"):
            await _call(call, client)
    client = AsyncEngineClient.connect(endpoint)
    with pytest.raises(ClientStateError, match="inside `async with`"):
        await _call(call, client)
    for name in ("model_card", "limits"):
        with pytest.raises(ClientStateError, match="inside `async with`"):
            getattr(client, name)
    with pytest.raises(ClientStateError, match="inside `async with`"):
        AsyncEngineClient.launch().endpoint  # noqa: B018
    await client.close()


@pytest.mark.parametrize("call", CALLS)
async def test_a_client_of_another_threads_loop_says_so(endpoint: str, call: str) -> None:
    async with connected(endpoint) as (_, client):
        for wrong in (_call(call, client), client.close()):
            with pytest.raises(ClientStateError, match="another one: enter and use it within"):
                await asyncio.to_thread(run, wrong)
        assert client.limits.max_num_seqs == 2, "it is as it was"


@pytest.mark.parametrize("call", CALLS)
def test_a_client_of_a_loop_that_is_over_says_so_and_can_be_closed(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanocore.client.connection.handshake.ClientSocket", FakeSocketOnce)
    client = AsyncEngineClient.connect("ipc:///fake")
    run(client.__aenter__())
    with pytest.raises(ClientStateError, match="another one: enter and use it within"):
        run(_call(call, client), patience_s=1.0)
    with pytest.raises(ClientStateError, match="it is closed now"):
        run(client.close())
    run(client.close())


class FakeSocketOnce(FakeSocket):
    """A FakeSocket that is made as ClientSocket is."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()


async def test_a_stream_that_is_read_on_in_another_loop_says_so(endpoint: str) -> None:
    async with connected(endpoint) as (engine, client):
        stream = client.generate([1], NO_TEXT)
        first = await engine.begin(_next(stream))
        engine.output({1: [10]})
        await first
        with pytest.raises(ClientStateError, match="another one"):
            await asyncio.to_thread(run, _next(stream))


async def _next(stream: Any) -> None:
    await anext(stream)


async def test_a_client_is_entered_once_at_a_time_and_may_be_entered_again(endpoint: str) -> None:
    async with connected(endpoint) as (engine, client):
        with pytest.raises(ClientStateError, match="open already"):
            await client.__aenter__()
        assert client.limits.max_num_seqs == 2
        await client.close()
        welcoming = asyncio.create_task(_welcome_again(engine))
        async with client:
            await welcoming


async def _welcome_again(engine: FakeEngine) -> None:
    await engine.receive(Bye)
    await engine.welcome()


@pytest.mark.parametrize("call", CALLS)
async def test_a_client_that_is_being_entered_says_so(endpoint: str, call: str) -> None:
    client = AsyncEngineClient.connect(endpoint)
    entering = asyncio.create_task(client.__aenter__())
    await asyncio.sleep(0)
    for wrong in (_call(call, client), client.__aenter__()):
        with pytest.raises(ClientStateError, match=r"not open yet|open already"):
            await wrong
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    with pytest.raises(ClientStateError, match="inside `async with`"):
        await _call(call, client)


async def test_requests_that_are_open_when_the_client_is_closed_say_so(endpoint: str) -> None:
    async with connected(endpoint) as (engine, client):
        request = await engine.begin(client.complete([1], NO_TEXT))
        await client.close()
        with pytest.raises(ClientStateError, match="closed"):
            await request


def _open_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def test_clients_that_come_and_go_leave_no_descriptors(endpoint: str) -> None:
    async def visit() -> None:
        async with connected(endpoint):
            pass

    await visit()
    num_open = _open_descriptors()
    for _ in range(5):
        await visit()
        with pytest.raises(EngineDeadError, match="within"):
            await AsyncEngineClient.connect(endpoint, timeout_s=0.01).__aenter__()
    assert _open_descriptors() == num_open


def test_an_llm_that_is_closed_says_so(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr(
        AsyncEngineClient, "launch", lambda *_, **__: AsyncEngineClient.connect("ipc:///fake")
    )
    monkeypatch.setattr("nanocore.client.connection.handshake.ClientSocket", FakeSocketOnce)
    llm = LLM()
    llm.close()
    for call in (
        lambda: llm.generate([[1]], NO_TEXT, use_tqdm=False),
        lambda: llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False),
        llm.get_tokenizer,
        llm.stats,
        llm.metrics,
        llm.reset_prefix_cache,
        lambda: llm.model_card,
    ):
        with pytest.raises(ClientStateError):
            call()
    llm.close()
