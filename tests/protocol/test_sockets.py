"""The two sockets over a real ipc endpoint: delivery, refusals, and nothing that blocks."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from nanocore.protocol.sockets.client_socket import ClientSocket
from nanocore.protocol.sockets.engine_socket import EngineSocket, bind_engine_socket
from nanocore.protocol.sockets.options import MAX_FRAME_BYTES, SendResult
from nanocore_conformance.peer_socket import PeerSocket

PATIENCE_MS = 10_000


@pytest.fixture
def engine(endpoint: str) -> Iterator[EngineSocket]:
    socket = bind_engine_socket(endpoint)
    yield socket
    socket.close()


def _receive(engine: EngineSocket) -> tuple[bytes, list[bytes]]:
    """The next message, which must come."""
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while time.monotonic() < deadline:
        if (message := engine.receive()) is not None:
            return message
        engine.wait(100)
    raise AssertionError("no message came")


async def _say(client: ClientSocket, *frames: bytes) -> None:
    await asyncio.wait_for(client.send(frames), PATIENCE_MS / 1000)


async def _hear(client: ClientSocket) -> list[bytes]:
    return await asyncio.wait_for(client.receive(), PATIENCE_MS / 1000)


async def test_a_message_keeps_its_place_and_its_number_of_frames(
    engine: EngineSocket, endpoint: str
) -> None:
    with closing(ClientSocket(endpoint)) as client:
        await _say(client, b"first")
        client.post([b"second"] * 3)
        client.post([b""])
        assert [_receive(engine)[1] for _ in range(3)] == [[b"first"], [b"second"] * 3, [b""]]


async def test_each_client_gets_its_own_answers(engine: EngineSocket, endpoint: str) -> None:
    with closing(ClientSocket(endpoint)) as one, closing(ClientSocket(endpoint)) as other:
        await _say(one, b"one")
        await _say(other, b"other")
        names = {frames[0]: peer for peer, frames in (_receive(engine), _receive(engine))}
        assert names[b"one"] != names[b"other"]
        for name, peer in names.items():
            assert engine.send(peer, [name]) is SendResult.SENT
        assert await _hear(one) == [b"one"]
        assert await _hear(other) == [b"other"]


def test_the_socket_file_is_private_whatever_the_umask(endpoint: str, short_path: Path) -> None:
    old_umask = os.umask(0)
    try:
        engine = bind_engine_socket(endpoint)
        assert (short_path / "engine.sock").stat().st_mode & 0o077 == 0
        assert os.umask(0) == 0, "the process's umask is put back"
        engine.close()
    finally:
        os.umask(old_umask)


def test_a_message_to_a_client_that_left_is_gone(engine: EngineSocket, endpoint: str) -> None:
    async def meet() -> bytes:
        with closing(ClientSocket(endpoint)) as client:
            await _say(client, b"x")
            routing_id, _ = _receive(engine)
        return routing_id

    _await_gone(engine, asyncio.run(meet()))


def _await_gone(engine: EngineSocket, routing_id: bytes) -> None:
    """Assert that the engine learns, soon, that a client has gone."""
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while engine.send(routing_id, [b"x"]) is not SendResult.GONE:
        assert time.monotonic() < deadline, "the client is still there"
        engine.wait(10)
        assert engine.receive() is None


async def test_a_client_that_does_not_read_is_full_and_blocks_nobody(
    engine: EngineSocket, endpoint: str
) -> None:
    with closing(ClientSocket(endpoint)) as sleeper, closing(ClientSocket(endpoint)) as reader:
        await _say(sleeper, b"x")
        sleeper_id, _ = _receive(engine)
        await _say(reader, b"x")
        reader_id, _ = _receive(engine)
        frame = bytes(4096)
        results = {engine.send(sleeper_id, [frame]) for _ in range(10_000)}
        assert results == {SendResult.SENT, SendResult.FULL}
        assert engine.send(reader_id, [b"hello"]) is SendResult.SENT
        assert await _hear(reader) == [b"hello"]


async def test_a_full_client_gets_everything_that_was_sent_once_it_reads(
    engine: EngineSocket, endpoint: str
) -> None:
    with closing(ClientSocket(endpoint)) as client:
        await _say(client, b"x")
        routing_id, _ = _receive(engine)
        results = [engine.send(routing_id, [b"%d" % i, bytes(4096)]) for i in range(10_000)]
        assert SendResult.FULL in results
        sent = [b"%d" % i for i, result in enumerate(results) if result is SendResult.SENT]
        for word in sent:
            engine.wait(0)  # it goes on sending
            assert (await _hear(client))[0] == word


async def test_a_frame_over_the_limit_disconnects_only_its_sender(
    engine: EngineSocket, endpoint: str
) -> None:
    with (
        closing(ClientSocket(endpoint)) as sender,
        closing(ClientSocket(endpoint)) as bystander,
    ):
        await _say(sender, b"sender")
        sender_id, _ = _receive(engine)
        await _say(bystander, b"bystander")
        bystander_id, _ = _receive(engine)
        await _say(sender, bytes(MAX_FRAME_BYTES + 1))
        _await_gone(engine, sender_id)
        assert engine.send(bystander_id, [b"still"]) is SendResult.SENT
        assert await _hear(bystander) == [b"still"]
        await _say(bystander, b"here")
        assert _receive(engine) == (bystander_id, [b"here"])


async def test_a_frame_at_the_limit_arrives(engine: EngineSocket, endpoint: str) -> None:
    with closing(ClientSocket(endpoint)) as client:
        await _say(client, bytes(MAX_FRAME_BYTES))
        assert [len(frame) for frame in _receive(engine)[1]] == [MAX_FRAME_BYTES]


def test_a_watched_descriptor_wakes_the_wait(engine: EngineSocket) -> None:
    event = os.eventfd(0, os.EFD_NONBLOCK)
    engine.watch(event)
    assert engine.wait(0) == set()
    os.eventfd_write(event, 1)
    assert engine.wait(PATIENCE_MS) == {event}
    os.eventfd_read(event)
    assert engine.wait(0) == set()
    os.close(event)


async def test_a_message_that_arrives_while_others_are_sent_wakes_the_receiver(
    engine: EngineSocket, endpoint: str
) -> None:
    """Sending uses up libzmq's only hint that something has arrived."""

    with closing(ClientSocket(endpoint)) as client:
        await _say(client, b"x")
        routing_id, _ = _receive(engine)
        for i in range(200):
            hearing = asyncio.ensure_future(_hear(client))
            await asyncio.sleep(0)  # it waits
            assert engine.send(routing_id, [b"%d" % i]) is SendResult.SENT
            client.post([b"y"])
            assert await hearing == [b"%d" % i]
            assert _receive(engine)[1] == [b"y"]


async def test_nothing_to_receive_on_a_client_is_none(engine: EngineSocket, endpoint: str) -> None:
    with closing(ClientSocket(endpoint)) as client:
        assert client.receive_nowait() is None
        await _say(client, b"x")
        assert engine.send(_receive(engine)[0], [b"a", b"b"]) is SendResult.SENT
        assert await _hear(client) == [b"a", b"b"]
        assert client.receive_nowait() is None


async def test_what_finds_no_room_is_sent_in_order_once_there_is_some(endpoint: str) -> None:
    with closing(ClientSocket(endpoint)) as client:  # nobody listens yet
        num_sent = 0
        while client.send_nowait([b"%d" % num_sent]):
            num_sent += 1
        client.post([b"posted"])
        taken_back = asyncio.ensure_future(client.send([b"taken back"]))
        waiting = asyncio.ensure_future(client.send([b"sent"]))
        await asyncio.sleep(0)
        assert not client.send_nowait([b"out of turn"])
        taken_back.cancel()
        engine = bind_engine_socket(endpoint)
        received = []
        while not received or received[-1] != b"sent":
            received.append((await asyncio.to_thread(_receive, engine))[1][0])
        expected = [b"%d" % i for i in range(num_sent)]
        assert received == [*expected, b"posted", b"sent"]
        await asyncio.wait_for(waiting, PATIENCE_MS / 1000)
        engine.close()


async def test_a_closed_client_leaves_nothing_behind_for_the_next_engine(endpoint: str) -> None:
    with closing(ClientSocket(endpoint)) as client:
        client.post([b"stale"])
    engine = bind_engine_socket(endpoint)
    assert engine.wait(0) == set()
    assert engine.receive() is None
    engine.close()


@pytest.mark.parametrize("num_frames", [7, 8, 9, 5000])
def test_of_a_message_with_too_many_frames_the_rest_is_skipped(
    engine: EngineSocket, endpoint: str, num_frames: int
) -> None:
    peer = PeerSocket(endpoint)
    peer.send([b"x"] * num_frames)
    peer.send([b"op", b"body"])
    _, frames = _receive(engine)
    assert frames == [b"x"] * 7
    assert _receive(engine)[1] == [b"op", b"body"]
    peer.close()
