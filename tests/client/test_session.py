"""A client's session, from HELLO to its end: who answers, who does not, and who is told."""

from __future__ import annotations

import asyncio
import gc
import re

import msgspec
import pytest

from nanocore import __version__
from nanocore.client import (
    AsyncEngineClient,
    EngineDeadError,
    EngineOverloadedError,
    NanocoreError,
    ProtocolError,
)
from nanocore.client.connection.engine_connection import EngineConnection
from nanocore.protocol.codec import encode
from nanocore.protocol.messages import (
    PROTOCOL_VERSION,
    Bye,
    Error,
    Message,
    Ping,
    Pong,
    Refused,
    Submit,
)
from tests.client.fake_engine import NO_TEXT, FakeEngine, connected, welcome_message
from tests.client.fake_socket import FakeSocket
from tests.client.running import PATIENCE_S, run


async def _open(endpoint: str, answer: list[bytes]) -> None:
    """Open a session with an engine that answers HELLO with these frames, and close it."""
    engine = FakeEngine(endpoint)
    try:
        opening = asyncio.create_task(EngineConnection.open(endpoint, PATIENCE_S))
        await engine.receive(Message)
        engine.send_frames(answer)
        await (await opening).close()
    finally:
        engine.close()


async def test_a_session_begins_with_the_version_and_gives_the_model_card(endpoint: str) -> None:
    engine = FakeEngine(endpoint)
    welcoming = asyncio.create_task(engine.welcome(welcome_message()))
    async with AsyncEngineClient.connect(endpoint, timeout_s=PATIENCE_S) as client:
        hello = await welcoming
        assert hello.protocol == PROTOCOL_VERSION
        assert hello.client == f"nanocore-python/{__version__}"
        assert client.model_card == welcome_message().model
        assert client.limits.max_num_seqs == 2
        assert client.endpoint == endpoint
    engine.close()


def test_a_welcome_of_another_version_and_refusals_are_typed_errors(endpoint: str) -> None:
    with pytest.raises(ProtocolError, match=r"speaks protocol \(2, 0\)"):
        run(_open(endpoint, encode(msgspec.structs.replace(welcome_message(), protocol=(2, 0)))))

    refused = Refused(message="this engine speaks 2.0 only", supported=[(2, 0)])
    with pytest.raises(ProtocolError, match=r"this engine speaks 2\.0 only"):
        run(_open(endpoint, encode(refused)))

    refused = Refused(message="64 clients", supported=[PROTOCOL_VERSION], retry_after_s=2.5)
    with pytest.raises(EngineOverloadedError, match="64 clients") as caught:
        run(_open(endpoint, encode(refused)))
    assert caught.value.retry_after_s == 2.5


@pytest.mark.parametrize(
    "answer", [encode(Bye()), encode(Ping()), [b"?"], [b"\x02", b"\x80"], [b"\x99", b"\x80"]]
)
def test_any_other_answer_to_hello_is_a_protocol_error(endpoint: str, answer: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        run(_open(endpoint, answer))


def test_nobody_at_the_endpoint_is_a_dead_engine_with_the_remedy(endpoint: str) -> None:
    async def scenario() -> None:
        async with AsyncEngineClient.connect(endpoint, timeout_s=0.05):
            raise AssertionError("nobody is there")

    with pytest.raises(EngineDeadError, match="nanocore-engine --listen") as caught:
        run(scenario())
    assert endpoint in str(caught.value)


def test_an_endpoint_without_an_answer_and_one_that_is_none_are_errors(endpoint: str) -> None:
    engine = FakeEngine(endpoint)
    with pytest.raises(EngineDeadError, match=r"within 0\.05 s"):
        run(EngineConnection.open(endpoint, timeout_s=0.05))
    engine.close()

    with pytest.raises(NanocoreError):
        run(EngineConnection.open("nonsense", timeout_s=0.05))


def test_somebody_who_says_nothing_is_told_from_nobody(endpoint: str) -> None:
    with pytest.raises(EngineDeadError, match="nothing listens there; start an engine"):
        run(EngineConnection.open(endpoint, timeout_s=0.05))
    engine = FakeEngine(endpoint)
    try:
        text = ""
        for timeout_s in (0.1, 1.0, 10.0):  # a connection takes as long as the machine is busy
            with pytest.raises(EngineDeadError) as caught:
                run(EngineConnection.open(endpoint, timeout_s), patience_s=20.0)
            text = str(caught.value)
            if "nobody" not in text:
                break
        assert "something listens there and is silent" in text
    finally:
        engine.close()


async def test_leaving_the_client_says_bye_once(endpoint: str) -> None:
    async with connected(endpoint) as (engine, client):
        await client.close()
        await client.close()
        await engine.receive(Bye)
        welcoming = asyncio.create_task(engine.welcome())
        async with AsyncEngineClient.connect(endpoint, timeout_s=PATIENCE_S):
            await welcoming  # a HELLO, and not another BYE


ENDS: dict[str, tuple[list[bytes], type[NanocoreError], str]] = {
    "bye": (encode(Bye(reason="SIGTERM")), EngineDeadError, "has stopped: SIGTERM"),
    "dead": (encode(Error(code="engine_dead", message="boom")), EngineDeadError, "boom"),
    "dead, for one request": (
        encode(Error(code="engine_dead", message="boom", request_id="a")),
        EngineDeadError,
        "boom",
    ),
    "no session": (
        encode(Error(code="no_session", message="PONG before HELLO, or after BYE")),
        ProtocolError,
        "closed this session.*silent for 10 s.*repeat the requests",
    ),
    "no message": ([b"\x12", b"\xc1"], ProtocolError, "OUTPUT"),
    "unknown op": ([b"\xee", b"\x80"], ProtocolError, "0xee"),
    "three frames": ([b"\x12", b"\x80", b""], ProtocolError, "3 frames"),
}


@pytest.mark.parametrize("end", ENDS)
async def test_when_the_session_ends_everyone_who_waits_is_told_and_the_next_call_opens_another(
    endpoint: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "nanocore.client.connection.session_manager.DIAGNOSIS_TIMEOUT_S", PATIENCE_S
    )
    frames, expected, text = ENDS[end]

    async with connected(endpoint) as (engine, client):
        waiting = [
            asyncio.create_task(client.complete([1], NO_TEXT, request_id="a")),
            asyncio.create_task(anext(client.generate([1], NO_TEXT, request_id="b"))),
            asyncio.create_task(client.stats()),
            asyncio.create_task(client.health()),
        ]
        await engine.accept(1)
        for _ in range(3):
            await engine.receive(Message)
        engine.send_frames(frames)
        if end == "no session":  # it is looked at what has become of the engine
            await engine.welcome()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(result, expected) for result in results)
        assert all(re.search(text, str(result)) for result in results)
        later = [asyncio.create_task(client.health()) for _ in range(3)]
        if end != "no session":
            await engine.welcome()
        for ping in [await engine.receive(Ping) for _ in later]:  # and not another HELLO
            engine.send(Pong(nonce=ping.nonce))
        await asyncio.gather(*later)


async def test_an_engine_that_falls_silent_is_dead(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanocore.client.connection.engine_connection.ENGINE_TIMEOUT_S", 0.05)

    async with connected(endpoint) as (engine, client):
        request = asyncio.create_task(client.complete([1], NO_TEXT))
        await engine.receive(Submit)
        with pytest.raises(EngineDeadError, match="has been silent for"):
            await request


@pytest.fixture
def socket(monkeypatch: pytest.MonkeyPatch) -> FakeSocket:
    fake = FakeSocket()
    monkeypatch.setattr("nanocore.client.connection.handshake.ClientSocket", lambda *_, **__: fake)
    return fake


def test_a_call_that_cannot_be_sent_is_told_of_the_engines_death(
    socket: FakeSocket, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        connection = await EngineConnection.open("ipc:///fake", PATIENCE_S)
        socket.stuck = True
        calls = [
            asyncio.create_task(connection.calls.control("stats")),
            asyncio.create_task(connection.calls.ping(PATIENCE_S)),
        ]
        await asyncio.sleep(0)
        connection.fail(EngineDeadError("killed"))
        for call in calls:
            with pytest.raises(EngineDeadError, match="killed"):
                await call
        await connection.close()

    run(scenario(), patience_s=1.0)
    gc.collect()
    assert caplog.messages == [], "a future's error that nobody awaited is logged by asyncio"


async def test_a_submit_that_never_left_frees_its_id(socket: FakeSocket) -> None:
    async with AsyncEngineClient.connect("ipc:///fake") as client:
        socket.stuck = True
        for _ in range(2):
            request = asyncio.create_task(client.complete([1], NO_TEXT, request_id="r"))
            await asyncio.sleep(0)
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request


async def test_an_engine_that_speaks_again_in_time_is_not_dead(
    socket: FakeSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanocore.client.connection.engine_connection.ENGINE_TIMEOUT_S", 0.0)
    monkeypatch.setattr(
        "nanocore.client.connection.engine_connection.GRACE_S", 1000.0
    )  # the test is the timer

    connection = await EngineConnection.open("ipc:///fake", PATIENCE_S)
    for _ in range(3):
        connection.check_silence()
        connection.take(encode(Pong()))
    connection.check_silence()
    connection.check_silence()
    with pytest.raises(EngineDeadError, match="has been silent for"):
        await connection.calls.control("stats")
    await connection.close()


@pytest.mark.parametrize(
    ("limit", "value", "by_turn"),
    [("_MAX_BATCH", 2, [3, 6, 9, 11]), ("_MAX_BATCH_BYTES", 0, list(range(1, 12)))],
)
async def test_a_burst_of_messages_leaves_turns_to_others_and_loses_none(
    socket: FakeSocket, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, by_turn: list[int]
) -> None:
    monkeypatch.setattr(f"nanocore.client.connection.engine_connection.{limit}", value)
    nonces = list(range(1, 12))

    for nonce in nonces:
        socket.say(Ping(nonce=nonce))
    connection = await EngineConnection.open("ipc:///fake", PATIENCE_S)
    answered = []
    while not answered or answered[-1] < len(nonces):
        await asyncio.sleep(0)
        answered.append(sum(isinstance(message, Pong) for message in socket.messages))
    assert answered == by_turn
    assert [m.nonce for m in socket.messages if isinstance(m, Pong)] == nonces
    await connection.close()
