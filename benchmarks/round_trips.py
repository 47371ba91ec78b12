"""How long a small message takes to a process and back, over ipc, by the clock on the wall.

echo    a ROUTER of plain pyzmq that sends back what it gets, in a process of its own
ping    PING to an engine's io thread, PONG back; the engine has no model, and nothing to do
health  the same through `AsyncEngineClient.health`, in an asyncio event loop

The first two are asked by the same plain DEALER that sends the same frames and sleeps in poll().
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import zmq
from overhead_client import no_model_engine

from nanocore.client import AsyncEngineClient
from nanocore.protocol.codec import encode
from nanocore.protocol.messages import PROTOCOL_VERSION, Bye, Hello, Op, Ping

_PONG: Final = bytes([Op.PONG])
_PATIENCE_MS: Final = 10_000
_BLOCK: Final = 250
"""Round trips to one of the three before it is the next one's turn."""


def round_trips_us(num_trips: int, repeats: int) -> dict[str, list[float]]:
    """The median of so many round trips of each kind, once per repeat."""
    figures: dict[str, list[float]] = {"echo": [], "ping": [], "health": []}
    with _echo_process() as echo_endpoint, no_model_engine() as (endpoint, _pid):
        echo, engine = _Dealer(echo_endpoint), _Dealer(endpoint)
        engine.open_session()

        async def measure() -> None:
            async with AsyncEngineClient.connect(endpoint) as client:
                for repeat in range(-1, repeats):  # the first one warms up
                    trips: dict[str, list[float]] = {name: [] for name in figures}
                    while len(trips["echo"]) < num_trips:
                        trips["echo"] += [echo.ask(i, Op.PING) for i in range(_BLOCK)]
                        trips["ping"] += [engine.ask(i, Op.PONG) for i in range(_BLOCK)]
                        for _ in range(_BLOCK):
                            trips["health"].append((await client.health()).latency_s)
                    if repeat >= 0:
                        for name, values in trips.items():
                            figures[name].append(statistics.median(values) * 1e6)

        asyncio.run(measure())
        echo.close()
        engine.close()
    return figures


class _Dealer:
    """One that blocks, of plain pyzmq."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(endpoint)

    def open_session(self) -> None:
        """Say HELLO, and wait for WELCOME."""
        self._socket.send_multipart(encode(Hello(protocol=PROTOCOL_VERSION)))
        assert self._receive()[0] == bytes([Op.WELCOME])

    def ask(self, nonce: int, answer: Op) -> float:
        """Seconds from a PING to the message with this op and its nonce."""
        frames = encode(Ping(nonce=nonce))
        start_s = time.perf_counter()
        self._socket.send_multipart(frames)
        received = self._receive()
        while received[0][0] != answer:  # the engine's own PING, once a second
            received = self._receive()
        elapsed_s = time.perf_counter() - start_s
        assert msgspec.msgpack.decode(received[1]).get("nonce", 0) == nonce
        return elapsed_s

    def close(self) -> None:
        self._socket.send_multipart(encode(Bye()))
        self._socket.close(linger=200)
        self._context.term()

    def _receive(self) -> list[bytes]:
        assert self._socket.poll(_PATIENCE_MS), "nothing came"
        return self._socket.recv_multipart()


@contextmanager
def _echo_process() -> Iterator[str]:
    """The endpoint of an echo. It ends with us, however we end."""
    with tempfile.TemporaryDirectory(prefix="nanocore-") as directory:
        endpoint = f"ipc://{directory}/echo.sock"
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), endpoint],
            stdin=subprocess.PIPE,
            start_new_session=True,  # as an engine: sessions are scheduled against each other
        )
        try:
            yield endpoint
        finally:
            process.kill()
            process.communicate()


def _echo(endpoint: str) -> None:
    """Serve until stdin ends."""

    def end_with_the_parent() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end_with_the_parent, daemon=True).start()
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(endpoint)
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    while True:
        poller.poll()
        router.send_multipart(router.recv_multipart())


if __name__ == "__main__":
    _echo(sys.argv[1])
