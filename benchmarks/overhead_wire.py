"""What nanocore's wire costs: encoding and decoding, and small messages there and back.

submit_us   a request, from token ids in the client to the engine's numpy array; CPU time
outputs_us  a step's OUTPUT of one token per request: encode, decode, unpack; CPU time
trips_us    round trips over ipc, by the clock on the wall, of three kinds in turn:
            echo    a ROUTER of plain pyzmq that sends back what it gets, in a process of its own
            ping    PING to an engine's io thread, PONG back; the engine has nothing else to do
            health  the same through `AsyncEngineClient.health`, in an asyncio event loop
            The first two are asked by the same plain DEALER, which sleeps in poll().
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import zmq

from nanocore.client import AsyncEngineClient, SamplingParams
from nanocore.engine_core.io.session import output_frames
from nanocore.engine_core.scheduling.token_columns import TokenColumns
from nanocore.protocol.codec import (
    client_decoder,
    encode,
    engine_decoder,
    pack_int32,
    unpack_output,
)
from nanocore.protocol.messages import PROTOCOL_VERSION, Bye, Hello, Op, Output, Ping, Submit

VOCAB_SIZE: Final = 151_936  # ids up to that of the largest vocabularies
NUM_TRIPS: Final = 1000  # of each kind, per repeat
_TRIPS_PER_TURN: Final = 250
_REPEAT_NS: Final = 40_000_000
_PATIENCE_MS: Final = 10_000


def submit_us(
    num_tokens: int, repeats: int, kind: Callable[[list[int]], Any] = list
) -> list[float]:
    """A request of so many random tokens. kind: of the caller's sequence, a list or an array."""
    drawn = random.Random(4)
    token_ids = kind([drawn.randrange(VOCAB_SIZE) for _ in range(num_tokens)])
    params = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=60_000, ignore_eos=True)
    sampling = params.for_engine()
    decode = engine_decoder().decode

    def both_ways() -> Any:
        column = pack_int32(token_ids)
        submit = Submit(request_id="0" * 32, prompt_token_ids=column, sampling=sampling)
        received = decode(encode(submit))
        assert isinstance(received, Submit)
        return np.frombuffer(received.prompt_token_ids, np.dtype("<i4"))

    assert both_ways().tolist() == list(token_ids)
    return _per_call_us(both_ways, repeats)


def as_int32_array(token_ids: list[int]) -> array[int]:
    """What a caller passes who has token ids in an array."""
    return array("i", token_ids)


def outputs_us(num_requests: int, repeats: int) -> list[float]:
    """A step's output of one token per request."""
    numbers = np.arange(num_requests)
    tokens = TokenColumns(numbers.astype(np.uint32), numbers.astype(np.int32))
    decode = client_decoder().decode

    def both_ways() -> Any:
        message = decode(output_frames(tokens, []))
        assert isinstance(message, Output)
        return unpack_output(message)

    return _per_call_us(both_ways, repeats)


def _per_call_us(call: Callable[[], Any], repeats: int) -> list[float]:
    """CPU microseconds per call; each repeat is long enough to swamp the timer."""
    for _ in range(3):
        call()
    start_ns = time.thread_time_ns()
    call()
    num_calls = max(3, min(20_000, _REPEAT_NS // max(1, time.thread_time_ns() - start_ns)))
    figures = []
    for _ in range(repeats):
        start_ns = time.thread_time_ns()
        for _ in range(num_calls):
            call()
        figures.append((time.thread_time_ns() - start_ns) / 1e3 / num_calls)
    return figures


@cache
def trips_us(repeats: int) -> dict[str, list[float]]:
    """Of each kind the median of NUM_TRIPS round trips, once per repeat."""
    return asyncio.run(_trips_us(repeats))


async def _trips_us(repeats: int) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {"echo": [], "ping": [], "health": []}
    async with AsyncEngineClient.launch() as client:
        with (
            _echo_process() as echo_endpoint,
            closing(_Dealer(echo_endpoint)) as echo,
            closing(_Dealer(client.endpoint)) as engine,
        ):
            engine.open_session()
            for repeat in range(-1, repeats):  # the first one warms up
                trips: dict[str, list[float]] = {name: [] for name in figures}
                while len(trips["echo"]) < NUM_TRIPS:
                    trips["echo"] += [echo.ask(i, Op.PING) for i in range(_TRIPS_PER_TURN)]
                    trips["ping"] += [engine.ask(i, Op.PONG) for i in range(_TRIPS_PER_TURN)]
                    for _ in range(_TRIPS_PER_TURN):
                        trips["health"].append((await client.health()).latency_s)
                if repeat >= 0:
                    for name, values in trips.items():
                        figures[name].append(statistics.median(values) * 1e6)
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
        """Say BYE."""
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
