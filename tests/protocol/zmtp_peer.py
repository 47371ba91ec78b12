"""A peer that speaks ZMTP by hand over a Unix socket, so that it can break every rule."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence

from nanocore.protocol.sockets.zmtp import ROUTER, command_frame, pack_message


def ready(kind: bytes) -> bytes:
    """READY of a socket of this kind."""
    value = len(kind).to_bytes(4, "big") + kind
    return command_frame(b"\5READY\x0bSocket-Type" + value + b"\x08Identity\0\0\0\0")


DEALER = ready(b"DEALER")
PATIENCE_S = 30.0


class ZmtpPeer:
    """One connection; its handshake is not awaited unless asked for."""

    def __init__(self, endpoint: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(endpoint.removeprefix("ipc://"))  # waits for a place in the backlog
        self.socket.settimeout(PATIENCE_S)

    def __enter__(self) -> ZmtpPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def greet(self, kind: bytes = b"DEALER") -> None:
        """Send the handshake of a socket of this kind."""
        self.socket.sendall(ROUTER.greeting + ready(kind))

    def send(self, *frames: bytes) -> None:
        """Send a message."""
        self.send_all([frames])

    def send_all(self, messages: Iterable[Sequence[bytes]]) -> None:
        """Send several at once."""
        self.socket.sendall(b"".join(b"".join(pack_message(message)) for message in messages))

    def read(self, num_bytes: int) -> bytes:
        """So many bytes, which must come."""
        data = b""
        while len(data) < num_bytes:
            piece = self.socket.recv(num_bytes - len(data))
            assert piece, f"hung up after {data!r}"
            data += piece
        return data

    def await_handshake(self) -> None:
        """Read the other side's."""
        assert self.read(len(ROUTER.greeting) + len(ROUTER.ready)) == ROUTER.greeting + ROUTER.ready

    def await_end(self) -> None:
        """Wait until the other side has hung up."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionError:
            pass

    def send_endless_message(self, frame: bytes) -> int:
        """Frames of one message until the other side hangs up; returns how many bytes it took."""
        num_bytes = 0
        try:
            while True:
                self.socket.sendall(frame)
                num_bytes += len(frame)
        except ConnectionError:
            return num_bytes
