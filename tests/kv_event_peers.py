"""Subscribers and replay clients for tests: plain zmq and untyped msgpack, as a router has them.

A subscription takes effect some time after it is made, and nothing tells a subscriber when. Tests
that need it in effect call `join`, which publishes batches until one arrives.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

from nanocore.engine_core.io.kv_event_publisher import KVEventPublisher
from nanocore.kv_cache.events import BlockRemoved, KVEventBatch

PATIENCE_MS = 60_000
END_SEQ = b"\xff" * 8


def numbered(sequence: int, num_copies: int = 1) -> KVEventBatch:
    """A batch whose block hash is its sequence number; `num_copies` of the hash make it long."""
    return KVEventBatch(sequence, [BlockRemoved([sequence.to_bytes(16, "big")] * num_copies)])


class Peer:
    """A connected socket; every receive must be answered in time."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str, max_unread: int
    ) -> None:
        self.socket = context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, max_unread)
        if kind == zmq.SUB:
            self.socket.subscribe(b"")
        self.socket.connect(endpoint)

    def receive(self, timeout_ms: int = PATIENCE_MS) -> list[bytes]:
        """The frames of the next message."""
        assert self.socket.poll(timeout_ms), "nothing came"
        return self.socket.recv_multipart()

    def sequences_to(self, last: int) -> list[int]:
        """Subscriber: the numbers of the next batches, up to `last`."""
        sequences: list[int] = []
        while not sequences or sequences[-1] < last:
            _topic, sequence, payload = self.receive()
            sequences.append(int.from_bytes(sequence, "big"))
            assert names(payload) == {sequences[-1]}
        return sequences

    def join(self, publisher: KVEventPublisher, first: int = 0) -> int:
        """Publish batches from `first` on until one arrives; returns the next number."""
        deadline = time.monotonic() + PATIENCE_MS / 1000
        sequence = first
        while time.monotonic() < deadline:
            publisher.publish(numbered(sequence))
            sequence += 1
            if self.socket.poll(10):
                assert self.sequences_to(sequence - 1)[0] >= first, "only what came later"
                return sequence
        raise AssertionError("the subscription does not take effect")

    def ask(self, *frames: bytes) -> None:
        """Replay client: send a request."""
        self.socket.send_multipart(frames)

    def answers(self) -> list[tuple[int, bytes]]:
        """Replay client: (sequence number, payload) up to the end of the replay."""
        answers = []
        while True:
            empty, _topic, sequence, payload = self.receive()
            assert empty == b""
            if sequence == END_SEQ:
                assert payload == b""
                return answers
            answers.append((int.from_bytes(sequence, "big"), payload))

    def replay(self, start: int) -> list[int]:
        """Replay client: the numbers that a replay from `start` brings."""
        self.ask(b"", start.to_bytes(8, "big"))
        return [sequence for sequence, _payload in self.answers()]


def names(payload: bytes) -> set[int]:
    """The number of a batch that `numbered` made, out of its payload."""
    _ts, events, _rank = msgspec.msgpack.decode(payload)
    return {block_hash for event in events for block_hash in event["block_hashes"]}


def untyped(payload: bytes) -> Any:
    """What any msgpack library makes of a payload."""
    return msgspec.msgpack.decode(payload)


class Peers:
    """Makes peers, and closes them at the end."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peers: list[Peer] = []

    def subscriber(self, endpoint: str) -> Peer:
        """A SUB to everything. Its own queue has no limit: it is not what is tested."""
        return self._made(Peer(self._context, zmq.SUB, endpoint, max_unread=0))

    def replay_client(self, endpoint: str, max_unread: int = 0) -> Peer:
        """A DEALER. max_unread: answers that wait in its own queue; 0 is no limit."""
        return self._made(Peer(self._context, zmq.DEALER, endpoint, max_unread))

    def close(self) -> None:
        """Close all of them."""
        for peer in self._peers:
            peer.socket.close()
        self._context.term()

    def _made(self, peer: Peer) -> Peer:
        self._peers.append(peer)
        return peer


@contextmanager
def peers() -> Iterator[Peers]:
    """Peers for a block."""
    made = Peers()
    try:
        yield made
    finally:
        made.close()
