"""Clients that leave anywhere, and clients that do not read: each costs itself alone.

A real engine and server. Connections are dropped after a random byte of their request or of its
response, by FIN or by RST. What is said of steps is read in the engine's step trace: the client's
question for `num_steps` goes behind the ABORT on one connection, so a step of a greater number was
planned when the engine had read the ABORT, however busy the machine is.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import socket
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import uvloop

from nanocore.client import AsyncEngineClient
from nanocore.client.chat.answer_stream import AnswerStream
from nanocore.http.server.http_connection import MAX_UNSENT_BYTES
from tests.client.running import in_uvloop, run
from tests.http.raw_http import RawServer, demo_engine, post, raw_server

pytestmark = pytest.mark.campaign

NUM_DROPS: Final = 1000
AT_ONCE: Final = 32
NUM_SLOW: Final = 4
SHORT: Final = 100
LONG: Final = 1200
"""Tokens, of the 2048 that the model has room for."""
KERNEL_BYTES: Final = 4096
"""What the kernel is asked to hold for a slow connection, on either side; it takes twice that."""
_RESET: Final = struct.pack("ii", 1, 0)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps") / "trace"


@pytest.fixture(scope="module")
def endpoint(trace: Path) -> Iterator[str]:
    with demo_engine("--step-trace", str(trace)) as engine:
        yield engine.endpoint


def request(number: int, max_tokens: int, stream: bool) -> bytes:
    """In any of the dialects, by its number."""
    turns = [{"role": "user", "content": f"tell me of {number}"}]
    common = {"temperature": 0, "ignore_eos": True, "stream": stream, "store": False}
    path, body = (
        ("/v1/chat/completions", {"messages": turns, "max_tokens": max_tokens}),
        ("/v1/completions", {"prompt": [f"{number}", "a b c"], "max_tokens": max_tokens}),
        ("/v1/responses", {"input": f"{number}", "max_output_tokens": max_tokens}),
        ("/v1/messages", {"messages": turns, "max_tokens": max_tokens}),
    )[number % 4]
    return post(path, json.dumps(body | common).encode())


def text_of(stream: bytes) -> str:
    """Of a chat's chunks."""
    text = ""
    for line in stream.decode().splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                text += choice["delta"].get("content") or ""
    return text


class Aborts:
    """Asks for `num_steps` behind every ABORT. last_steps: the answers, by request id."""

    def __init__(self, client: AsyncEngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
        self.last_steps: dict[str, int] = {}
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()
        close = AnswerStream.close

        def closed(answer: AnswerStream) -> None:
            request_id = answer.request.request_id
            is_abort = not answer.finished and request_id not in self.last_steps
            close(answer)
            if is_abort:
                self.last_steps[request_id] = -1
                self._tasks.add(asyncio.ensure_future(self._ask(request_id)))

        monkeypatch.setattr(AnswerStream, "close", closed)

    async def _ask(self, request_id: str) -> None:
        self.last_steps[request_id] = (await self._client.stats()).num_steps

    async def all_known(self) -> None:
        await asyncio.gather(*self._tasks)
        self._tasks.clear()
        await asyncio.sleep(0)  # the wake-up from gather holds them all until this task's next step


async def drop_one(server: RawServer, rng: random.Random, number: int) -> None:
    data = request(number, rng.randint(1, 60), rng.random() < 0.7)
    client = await server.connect()
    if rng.random() < 0.3:
        client.writer.write(data[: rng.randint(0, len(data))])
    else:
        client.writer.write(data)
        wanted = rng.randint(0, 4000)
        while wanted > 0 and (got := await client.reader.read(wanted)):
            wanted -= len(got)
            if b"0\r\n\r\n" in got or b'"usage"' in got:
                break  # no more will come: the connection is kept
    if rng.random() < 0.5:
        sock = client.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    client.leave()


async def drop(server: RawServer, rng: random.Random, num_drops: int) -> None:
    """So many connections, some at once; all are gone at the end."""
    numbers = iter(range(num_drops))

    async def dropper() -> None:
        for number in numbers:
            await drop_one(server, rng, number)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(dropper())
    await server.connections_gone()


async def idle_stats(client: AsyncEngineClient) -> Any:
    """When the engine has nothing to do."""
    while True:
        stats = await client.stats()
        if stats.num_requests_running + stats.num_requests_waiting == 0:
            return stats


async def num_objects(aborts: Aborts) -> int:
    """That could be leaked."""
    await aborts.all_known()
    gc.collect()
    return len(gc.get_objects())


def held(server: RawServer) -> dict[str, int]:
    """What a leak would be counted in."""
    assert server.client._manager is not None
    session = server.client._manager._session
    assert session is not None
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "tasks": len(asyncio.all_tasks()),
        "connections": len(server.server.state.connections),
        "streams": len(session.connection._requests),
        "deliveries": len(server.app.state.deliveries._open),
    }


def test_connections_dropped_anywhere_leave_nothing(
    endpoint: str, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = [request(4 * i, 200, True) for i in range(4)]
    aborts: Aborts | None = None

    async def scenario() -> None:
        nonlocal aborts
        async with raw_server(endpoint) as server:
            bystanders = [await server.connect() for _ in long]
            quiet = [
                text_of((await peer.ask(data)).body)
                for peer, data in zip(bystanders, long, strict=True)
            ]
            aborts = Aborts(server.client, monkeypatch)
            rng = random.Random(22)
            free_blocks = (await idle_stats(server.client)).num_free_blocks

            async def stand_by(number: int, done: asyncio.Event) -> None:
                while True:
                    answer = await bystanders[number].ask(long[number])
                    assert text_of(answer.body) == quiet[number]
                    if done.is_set():
                        return

            async def drop_beside_bystanders() -> int:
                """The objects there are when nothing is on its way any more."""
                done = asyncio.Event()
                async with asyncio.TaskGroup() as group:
                    for number in range(len(long)):
                        group.create_task(stand_by(number, done))
                    await drop(server, rng, NUM_DROPS // 2)
                    done.set()
                await idle_stats(server.client)
                return await num_objects(aborts)

            before = await drop_beside_bystanders()
            grown = await drop_beside_bystanders() - before
            assert grown < NUM_DROPS // 20, "something is left of each"
            await aborts.all_known()
            stats = await idle_stats(server.client)
            assert stats.num_free_blocks == free_blocks == stats.num_blocks
            assert stats.num_aborts >= NUM_DROPS // 10
            after = held(server)
            await drop(server, rng, AT_ONCE)
            await aborts.all_known()
            await idle_stats(server.client)
            assert held(server) == after
            assert (after["streams"], after["deliveries"]) == (0, 0)
            assert after["connections"] == len(bystanders)

    run(scenario(), 300, uvloop.new_event_loop)
    assert aborts is not None
    last: dict[str, int] = {}
    for line in trace.read_text().splitlines():
        step = json.loads(line)
        last |= dict.fromkeys((name.partition("#")[0] for name in step["scheduled"]), step["step"])
    late = {
        name: (last[name], read)
        for name, read in aborts.last_steps.items()
        if last.get(name, 0) > read
    }
    assert len(aborts.last_steps) > NUM_DROPS // 10
    assert late == {}


@in_uvloop
async def test_a_lost_connection_sends_its_abort_in_a_few_turns_of_the_event_loop(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with raw_server(endpoint) as server:
        for number in range(4):
            client = await server.connect()
            client.writer.write(request(number, LONG // 2, True))
            assert await client.reader.read(1)
            (connection,) = server.server.state.connections
            open_before = held(server)["deliveries"]
            connection.transport.abort()
            for _ in range(4):
                await asyncio.sleep(0)
            assert (open_before, held(server)["deliveries"]) == (1, 0)
            client.leave()


async def slow_client(server: RawServer, data: bytes) -> socket.socket:
    """Sends, and does not read."""
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
    peer.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(peer, ("127.0.0.1", server.port))
    await loop.sock_sendall(peer, data)
    return peer


async def read_all(peer: socket.socket) -> bytes:
    found = b""
    loop = asyncio.get_running_loop()
    while not found.endswith(b"0\r\n\r\n"):
        got = await loop.sock_recv(peer, 65536)
        assert got, "the answer has been cut"
        found += got
    peer.close()
    return found


def dechunked(response: bytes) -> bytes:
    """A response's body."""
    rest = response.partition(b"\r\n\r\n")[2]
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body


@in_uvloop
async def test_slow_readers_cost_kilobytes_and_nobody_else(endpoint: str) -> None:
    data = [request(4 * i, LONG, True) for i in range(NUM_SLOW)]
    short = request(400, SHORT, True)

    async with raw_server(endpoint, send_buffer_bytes=KERNEL_BYTES) as server:
        readers = [await server.connect() for _ in data]
        pairs = zip(readers, data, strict=True)
        answers = await asyncio.gather(*(reader.ask(one) for reader, one in pairs))
        quiet = [answer.body for answer in answers]
        bystander = readers[0]
        whole = (await bystander.ask(short)).body
        num_tokens = (await server.client.stats()).generation_tokens + NUM_SLOW * LONG
        peers = [await slow_client(server, one) for one in data]
        while len(server.app.state.deliveries._open) < NUM_SLOW:
            await asyncio.sleep(0)
        tracemalloc.start()
        size_before = tracemalloc.get_traced_memory()[0]
        while (await server.client.stats()).generation_tokens < num_tokens:
            assert text_of((await bystander.ask(short)).body) == text_of(whole)
            num_tokens += SHORT
        gc.collect()
        size_bytes = tracemalloc.get_traced_memory()[0] - size_before
        tracemalloc.stop()
        buffers = [
            connection.transport.get_write_buffer_size()
            for connection in server.server.state.connections
        ]
        assert sum(size > 0 for size in buffers) == NUM_SLOW, "they have not been slow"
        assert max(buffers) < 2 * MAX_UNSENT_BYTES
        assert size_bytes < NUM_SLOW * 160_000  # 16 KiB of small chunks are 70 KiB of objects
        for peer, before in zip(peers, quiet, strict=True):
            late = dechunked(await read_all(peer))
            assert text_of(late) == text_of(before)
            assert late.count(b"data: ") < before.count(b"data: ")
            assert late.endswith(b"data: [DONE]\n\n")
