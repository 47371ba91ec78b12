"""A client by hand: one session in which messages are whatever a test, or an attacker, says.

It needs the protocol and nothing else, so that processes which are there to be killed start
quickly.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from nanocore.protocol.codec import client_decoder
from nanocore.protocol.messages import Message, Op, Reply
from nanocore.protocol.metrics import Stats
from nanocore_conformance.peer_socket import PeerSocket
from tests.hostile.messages import frames, hello

PATIENCE_S: Final = 60.0
"""How long anything may take before it counts as never."""
Heard = TypeVar("Heard", bound=Message)


class Visitor:
    """One session without the SDK: what is sent is what a test says, and answers are read."""

    def __init__(self, endpoint: str) -> None:
        self._peer = PeerSocket(endpoint)
        self._decoder = client_decoder()
        self._peer.send(hello())

    def send(self, op: int, **body: Any) -> None:
        """Send one message, as it is."""
        self.send_frames(frames(op, **body))

    def send_frames(self, message: list[bytes]) -> None:
        """Send frames that need be no message."""
        self._peer.send(message)

    def hear(self) -> Message:
        """The next message of the engine, which must come; its PINGs are answered and left out."""
        deadline_s = time.monotonic() + PATIENCE_S
        while (message := self._peer.receive(deadline_s - time.monotonic())) is not None:
            if message[0][0] == Op.PING:
                self._peer.send([bytes([Op.PONG]), message[1]])
            else:
                return self._decoder.decode(message)
        raise TimeoutError(f"the engine says nothing for {PATIENCE_S} s")

    def hear_of(self, kind: type[Heard]) -> Heard:
        """The next message of this kind; others are passed over."""
        while not isinstance(message := self.hear(), kind):
            pass
        return message

    def stats(self) -> Stats:
        """The engine's counters; messages before the answer are passed over."""
        self.send(Op.CONTROL, call_id=1, operation="stats")
        stats = self.hear_of(Reply).stats
        assert stats is not None
        return stats

    def leave(self) -> None:
        """End the session. Idempotent."""
        self._peer.send(frames(Op.BYE))
        self._peer.close()


@contextmanager
def visitor(endpoint: str) -> Iterator[Visitor]:
    """A session that ends with the block."""
    visiting = Visitor(endpoint)
    try:
        yield visiting
    finally:
        visiting.leave()
