"""The engine that is played to a client hears everything the client has said."""

from __future__ import annotations

import os
from contextlib import suppress

from nanocore.conformance.played_engine import PlayedEngine
from nanocore.protocol.codec import encode
from nanocore.protocol.messages import Hello
from nanocore.protocol.sockets import EngineSocket


class SocketReadByWaiting(EngineSocket):
    """Messages that came are taken in by `wait`; here they come as the client exits."""

    def __init__(self, sent: list[bytes]) -> None:
        self._sent: list[list[bytes]] = [sent]
        self._taken_in: list[list[bytes]] = []

    def wait(self, timeout_ms: int) -> set[int]:
        self._taken_in, self._sent = self._taken_in + self._sent, []
        return set()

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        if self._taken_in:
            return b"client", self._taken_in.pop(0)
        with suppress(ChildProcessError):  # once its exit has been seen
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        return None


def test_what_a_client_said_as_it_exited_is_heard() -> None:
    """Seen as a BYE that was missing where the machine was busy."""
    socket = SocketReadByWaiting(encode(Hello(protocol=(1, 4), client="gone")))
    played = PlayedEngine(socket, ["true"], 30.0, set())
    try:
        played.hello()
    finally:
        played.close()
