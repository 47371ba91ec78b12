"""The engine that is played to a client hears everything the client has said."""

from __future__ import annotations

import os
from pathlib import Path

from nanocore.protocol.codec import encode
from nanocore.protocol.messages import Hello
from nanocore_conformance.played_engine import PlayedEngine


class SocketReadByWaiting:
    """Messages that came are taken in by `wait`; here they come as the client exits.

    pid_pipe: a named pipe to which the client writes its process id.
    """

    def __init__(self, sent: list[bytes], pid_pipe: Path) -> None:
        self._sent, self._pid_pipe = [sent], pid_pipe
        self._taken_in: list[list[bytes]] = []
        self._has_exited = False

    def wait(self, timeout_ms: int) -> set[int]:
        self._taken_in, self._sent = self._taken_in + self._sent, []
        return set()

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        if not self._has_exited:
            pid = int(self._pid_pipe.read_text())
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            self._has_exited = True
        return (b"client", self._taken_in.pop(0)) if self._taken_in else None


def test_what_a_client_said_as_it_exited_is_heard(tmp_path: Path) -> None:
    """Seen as a BYE that was missing where the machine was busy."""
    pid_pipe = tmp_path / "pid"
    os.mkfifo(pid_pipe)
    socket = SocketReadByWaiting(encode(Hello(protocol=(1, 6), client="gone")), pid_pipe)
    played = PlayedEngine(socket, ["sh", "-c", f"echo $$ > {pid_pipe}"], 30.0, set())
    try:
        played.hello()
    finally:
        played.close()
