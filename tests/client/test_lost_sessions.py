"""A session that is lost: who is told what, and how the client goes on.

The timeout of silence is out of the question in all of these tests, so none of them is its doing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from nanocore.client import (
    AsyncEngineClient,
    ClientStateError,
    EngineDeadError,
    EngineOverloadedError,
    InvalidRequestError,
    ProtocolError,
)
from nanocore.protocol.messages import (
    PROTOCOL_VERSION,
    Bye,
    Error,
    Hello,
    Message,
    Ping,
    Pong,
    Refused,
    Welcome,
)
from tests.client.fake_engine import (
    MAX_NUM_SEQS,
    NO_TEXT,
    FakeEngine,
    connected,
    until_lost,
    welcome_message,
)
from tests.client.running import PATIENCE_S, run
from tests.protocol.keys import free_port, make_key_folders

GONE = "the connection to the engine was closed; nothing listens at .*nanocore-engine --listen"


@pytest.fixture(autouse=True)
def _no_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanocore.client.connection.engine_connection.ENGINE_TIMEOUT_S", 1000.0)
    monkeypatch.setattr("nanocore.client.connection.session_manager.DIAGNOSIS_TIMEOUT_S", 1000.0)


def _welcome(instance: str, model: str = "/no/such/folder") -> Welcome:
    welcome = welcome_message()
    return replace(
        welcome, engine_instance=instance, model=replace(welcome.model, model=model, block_size=32)
    )


async def _serves(engine: FakeEngine, client: AsyncEngineClient) -> None:
    """Assert that a request runs, and that its SUBMIT is the next message."""
    request = await engine.begin(client.complete([1], NO_TEXT))
    engine.finish(1)
    assert (await request).finished


async def test_the_end_of_the_engines_process_is_told_at_once(endpoint: str) -> None:
    async with connected(endpoint) as (engine, client):
        request = asyncio.create_task(client.complete([1], NO_TEXT))
        call = await engine.begin(client.stats())
        engine.close()
        for waiting in (request, call):
            with pytest.raises(EngineDeadError, match=GONE):
                await waiting
        with pytest.raises(EngineDeadError, match=GONE):
            await client.health()


def test_a_tcp_connection_that_ends_is_told_at_once(tmp_path: Path) -> None:
    keys = make_key_folders(tmp_path)
    folder = keys.client("alice")
    endpoint = f"tcp://127.0.0.1:{free_port()}"

    async def scenario() -> None:
        engine = FakeEngine(endpoint, keys.engine_keys)
        welcoming = asyncio.create_task(engine.welcome())
        async with AsyncEngineClient.connect(endpoint, curve_dir=folder, resume=False) as client:
            await welcoming
            request = await engine.begin(client.complete([1], NO_TEXT))
            engine.close()
            with pytest.raises(EngineDeadError, match=GONE):
                await request

    run(scenario(), patience_s=2 * PATIENCE_S)


async def test_what_the_engine_said_before_it_went_is_heard(endpoint: str) -> None:
    async with connected(endpoint) as (engine, client):
        done = await engine.begin(client.complete([1], NO_TEXT))
        open_still = await engine.begin(client.complete([1], NO_TEXT), 2)
        engine.finish(1)
        engine.send(Bye(reason="SIGTERM"))
        engine.close()
        assert (await done).finished
        with pytest.raises(EngineDeadError, match="has stopped: SIGTERM"):
            await open_still
        with pytest.raises(EngineDeadError, match="has stopped: SIGTERM; nothing listens"):
            await client.stats()


async def test_a_new_engine_at_the_endpoint_gets_one_hello_and_nothing_of_the_old_ones(
    endpoint: str,
) -> None:
    async with connected(endpoint) as (old, client):
        waiting = [asyncio.create_task(client.complete([1], NO_TEXT)) for _ in range(3)]
        for handle in range(3):
            await old.accept(handle)
        old.close()
        new = FakeEngine(endpoint)
        await new.welcome(_welcome("new", "/other"))
        for request in waiting:
            with pytest.raises(EngineDeadError, match=r"a new engine .* were open"):
                await request
        assert client.model_card.model == "/other"
        await _serves(new, client)
        new.close()


async def test_an_engine_that_was_replaced_while_nothing_was_open_is_nobodys_error(
    endpoint: str,
) -> None:
    async with connected(endpoint) as (old, client):
        with pytest.raises(InvalidRequestError, match="/no/such/folder"):
            await client.get_tokenizer()
        old.close()
        await until_lost(client)
        new = FakeEngine(endpoint)
        welcoming = asyncio.create_task(new.welcome(_welcome("new", "/other")))
        with pytest.raises(InvalidRequestError, match="/other"):
            await client.get_tokenizer()
        await welcoming
        new.close()


@asynccontextmanager
async def _relayed(endpoint: str, folder: Path) -> AsyncIterator[tuple[str, Any]]:
    """(another endpoint that leads to this one, what breaks all connections that go that way)."""
    writers: list[asyncio.StreamWriter] = []
    tasks: list[asyncio.Task[None]] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward = await asyncio.open_unix_connection(endpoint.removeprefix("ipc://"))
        writers.extend((writer, onward[1]))
        tasks.append(asyncio.create_task(copy(reader, onward[1])))
        tasks.append(asyncio.create_task(copy(onward[0], writer)))

    def cut() -> None:
        for writer in writers:
            writer.transport.abort()
        writers.clear()

    path = folder / "relay.sock"
    server = await asyncio.start_unix_server(relay, path)
    async with server:
        yield f"ipc://{path}", cut
        cut()
        await asyncio.gather(*tasks)


async def test_a_connection_that_broke_is_not_taken_for_the_engines_death(
    endpoint: str, short_path: Path
) -> None:
    engine = FakeEngine(endpoint)
    async with _relayed(endpoint, short_path) as (relay, cut):
        welcoming = asyncio.create_task(engine.welcome())
        async with AsyncEngineClient.connect(relay, resume=False) as client:
            await welcoming
            request = await engine.begin(client.complete([1], NO_TEXT))
            cut()
            await engine.welcome()
            with pytest.raises(ProtocolError, match="or the connection broke") as caught:
                await request
            assert caught.value.code == "no_session"
            await _serves(engine, client)
    engine.close()


async def test_an_engine_that_refuses_every_message_is_asked_for_one_session(endpoint: str) -> None:
    """As one that has closed ours: it answers each PONG and SUBMIT with no_session."""

    async with connected(endpoint) as (engine, client):
        waiting = [asyncio.create_task(client.complete([1], NO_TEXT)) for _ in range(3)]
        for _ in waiting:
            await engine.receive(Message)
        for _ in waiting:
            engine.send(Error(code="no_session", message="SUBMIT before HELLO"))
        await engine.welcome()
        for request in waiting:
            with pytest.raises(ProtocolError, match="the engine closed this session"):
                await request
        await _serves(engine, client)


async def test_a_lost_session_that_nobody_needs_is_left_lost(endpoint: str) -> None:
    async with connected(endpoint) as (engine, client):
        engine.send(Error(code="no_session", message="PONG before HELLO"))
        engine.send(Ping())  # would be answered in a session
        await until_lost(client)
        call = asyncio.create_task(client.health())
        await engine.welcome()
        engine.send(Pong(nonce=(await engine.receive(Ping)).nonce))
        await call


async def test_an_engine_that_does_not_say_hello_does_not_hold_up_the_bad_news(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be loading its model; whoever comes then shares the one HELLO that it has got."""
    monkeypatch.setattr("nanocore.client.connection.session_manager.DIAGNOSIS_TIMEOUT_S", 0.01)

    async with connected(endpoint) as (old, client):
        request = await old.begin(client.complete([1], NO_TEXT))
        old.close()
        new = FakeEngine(endpoint)
        with pytest.raises(EngineDeadError, match=r"was closed; ipc:.* has not answered since"):
            await request
        later = asyncio.create_task(client.complete([1], NO_TEXT))
        await new.welcome(_welcome("new"))
        await new.accept(1)
        new.finish(1)
        assert (await later).finished
        new.close()


async def test_a_new_engine_with_too_many_clients_says_when_to_come_again(endpoint: str) -> None:
    full = Refused(message="too many clients", supported=[PROTOCOL_VERSION], retry_after_s=7.0)

    async with connected(endpoint) as (old, client):
        request = await old.begin(client.complete([1], NO_TEXT))
        old.close()
        new = FakeEngine(endpoint)
        await new.welcome(full)
        with pytest.raises(EngineDeadError, match="was closed; too many clients"):
            await request
        later = asyncio.create_task(client.complete([1], NO_TEXT))
        await new.welcome(full)
        with pytest.raises(EngineOverloadedError) as caught:
            await later
        assert caught.value.retry_after_s == 7.0
        new.close()


async def test_whoever_stops_waiting_for_the_next_session_leaves_it_to_the_others(
    endpoint: str,
) -> None:
    async with connected(endpoint) as (engine, client):
        engine.send(Bye(reason="?"))
        await until_lost(client)
        leaving, staying = (asyncio.create_task(client.health()) for _ in range(2))
        await engine.receive(Hello)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        engine.send(welcome_message())
        engine.send(Pong(nonce=(await engine.receive(Ping)).nonce))
        await staying


async def test_closing_ends_the_wait_for_the_next_session(endpoint: str) -> None:
    async with connected(endpoint) as (engine, client):
        engine.send(Bye(reason="?"))
        await until_lost(client)
        waiting = asyncio.create_task(client.health())
        await engine.receive(Hello)
        await client.close()
        with pytest.raises(ClientStateError, match="closed"):
            await waiting


async def test_the_limits_are_those_of_the_engine_that_serves_now(endpoint: str) -> None:
    async with connected(endpoint) as (old, client):
        assert client.limits.max_num_seqs == MAX_NUM_SEQS
        request = asyncio.create_task(client.stats())
        await old.receive(Message)
        old.close()
        new = FakeEngine(endpoint)
        welcome = _welcome("new")
        await new.welcome(replace(welcome, limits=replace(welcome.limits, max_num_seqs=77)))
        await asyncio.gather(request, return_exceptions=True)
        assert client.limits.max_num_seqs == 77
        new.close()
