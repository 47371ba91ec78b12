"""Processes around an engine under attack: attackers and bystanders.

Each function is the body of one process. What it did goes through its end of a pipe as one dict.
Times are of the monotonic clock, which all processes share.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections import Counter
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event, Semaphore
from typing import Any, Final

import msgspec

from nanocore.client import AsyncEngineClient, SamplingParams
from nanocore.protocol.messages import Op
from nanocore_conformance.peer_socket import PeerSocket
from tests.hostile.messages import BYSTANDER_IDS, draw, frames, hello, submit

BYSTANDER_TOKENS: Final = 32
NUM_PROMPTS: Final = 3  # of each bystander
ANSWER_TIMEOUT_S: Final = 60.0
_GREETING: Final = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + b"\0" * 48
_DEALER: Final = b"\x0bSocket-Type\0\0\0\6DEALER\x08Identity\0\0\0\0"
_READY: Final = b"\4" + bytes([6 + len(_DEALER)]) + b"\5READY" + _DEALER


class _Answer(msgspec.Struct):
    """What is looked at of an engine's message."""

    code: str = ""
    nonce: int = 0


class Attacker:
    """One connection that sends hostile messages and counts what comes back, by code or op."""

    def __init__(self, endpoint: str) -> None:
        self._peer = PeerSocket(endpoint)
        self._decoder = msgspec.msgpack.Decoder(_Answer)
        self.answers: Counter[str] = Counter()
        self._last_nonce = -1
        self._peer.send(hello())

    def send(self, message: list[bytes]) -> None:
        """Send a message and take in what has come."""
        self._peer.send(message)
        self.take(0.0)

    def take(self, timeout_s: float) -> None:
        """Take in answers until none comes in time."""
        while (answer := self._peer.receive(timeout_s)) is not None:
            timeout_s = 0.0
            op = Op(answer[0][0])
            body = self._decoder.decode(answer[1])
            if op == Op.PONG:
                self._last_nonce = body.nonce
            self.answers[f"ERROR {body.code}" if op == Op.ERROR else op.name] += 1

    def finish(self) -> None:
        """Wait until everything sent has been handled, and leave."""
        nonce = 2**50
        self._peer.send(hello())  # in case there is no session; else it is an error
        self._peer.send(frames(Op.PING, nonce=nonce))
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        while self._last_nonce != nonce:
            assert time.monotonic() < deadline_s, "the engine does not answer an attacker's PING"
            self.take(1.0)
        self._peer.send(frames(Op.BYE))
        self._peer.close()


def attack(endpoint: str, seed: int, num_messages: int, results: Connection) -> None:
    """Send that many messages of all kinds, as fast as the engine takes them."""
    rng = random.Random(seed)
    attacker = Attacker(endpoint)
    sent: Counter[str] = Counter()
    num_sent = 0
    while num_sent < num_messages:
        kind, messages = draw(rng)
        for message in messages:
            attacker.send(message)
        num_sent += len(messages)
        sent[kind] += len(messages)
    attacker.finish()
    results.send({"sent": sent, "answers": attacker.answers})


def never_read(endpoint: str, seed: int, stop: Event, results: Connection) -> None:
    """Ask for files, figures and tokens without ever reading an answer, 1000 messages a second."""
    rng = random.Random(seed)
    sent = 0
    peer = PeerSocket(endpoint)
    peer.send(hello())
    chunk = frames(Op.CONTROL, call_id=1, operation="read_file", file="tokenizer.json")
    while not stop.wait(0.01):
        if sent % 5000 == 0:
            peer.send(hello())
        for _ in range(9):
            peer.send(rng.choice([chunk, frames(Op.PING, nonce=1)]))
        body = submit(rng)
        body["sampling"]["max_tokens"] = 200
        peer.send(frames(Op.SUBMIT, **body))
        sent += 10
    peer.close()
    results.send({"sent": {"never read": sent}, "answers": {}})


def churn(endpoint: str, seed: int, num_connections: int, results: Connection) -> None:
    """Connect and leave: clients that say nothing, HELLO, noise; and peers that speak no ZMTP."""
    rng = random.Random(seed)
    sent: Counter[str] = Counter()
    for _ in range(num_connections):
        if rng.random() < 0.3:
            peer = PeerSocket(endpoint)
            for message in rng.choice([[], [hello()], [hello(), frames(Op.BYE)], [[b"?"]]]):
                peer.send(message)
            peer.close()
            sent["connections"] += 1
        else:
            _speak_no_zmtp(rng, endpoint.removeprefix("ipc://"))
            sent["raw connections"] += 1
    results.send({"sent": sent, "answers": {}})


def _speak_no_zmtp(rng: random.Random, path: str) -> None:
    """One connection of noise, of another protocol, or of ZMTP that goes wrong at some point."""
    long_frame = b"\2" + rng.choice([2**63, 2**64 - 1, 2**24 + 1]).to_bytes(8, "big")
    data = rng.choice([
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        rng.randbytes(rng.randrange(1, 300)),
        _GREETING[: rng.randrange(64)],
        _GREETING + rng.randbytes(rng.randrange(100)),
        _GREETING.replace(b"NULL", b"EVIL"),
        _GREETING + _READY + rng.randbytes(rng.randrange(100)),
        _GREETING + _READY + long_frame,
        _GREETING + _READY + b"\4\5\4PING",
        _GREETING + _READY + b"\7" + b"\0" * 50,
        _GREETING + _READY[:-3] + b"\xff" * 10,
        _GREETING + _READY + b"\1\1\x10" * rng.randrange(300),
        b"\1\0\6\0hello",
    ])  # fmt: skip
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_TIMEOUT_S)
        connection.connect(path)
        try:
            connection.sendall(data)
            if rng.random() < 0.3:
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1000)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the engine has hung up, as it should


def stand_by(
    endpoint: str, client: int, ready: Semaphore, stop: Event, results: Connection
) -> None:
    """Stream greedy requests one after the other through the SDK, and record their tokens.

    ready: released once every prompt has been answered.
    """
    results.send({"requests": asyncio.run(_stream(endpoint, client, ready, stop))})


async def _stream(
    endpoint: str, client: int, ready: Semaphore, stop: Event
) -> list[dict[str, Any]]:
    requests: list[dict[str, Any]] = []
    params = SamplingParams(
        temperature=0, max_tokens=BYSTANDER_TOKENS, ignore_eos=True, detokenize=False
    )
    async with AsyncEngineClient.connect(endpoint, timeout_s=ANSWER_TIMEOUT_S) as engine:
        while not stop.is_set():
            number = len(requests)
            prompt = [(client * 50 + number % NUM_PROMPTS + i) % 256 for i in range(20)]
            request_id = BYSTANDER_IDS.format(client=client, number=number)
            token_ids: list[int] = []
            async for output in engine.generate(prompt, params, request_id=request_id):
                token_ids = output.outputs[0].token_ids
            requests.append({
                "id": request_id, "prompt": prompt[0], "token_ids": token_ids,
                "end_s": time.monotonic(), "finish_reason": output.outputs[0].finish_reason,
            })  # fmt: skip
            if len(requests) == NUM_PROMPTS:
                ready.release()
    return requests
