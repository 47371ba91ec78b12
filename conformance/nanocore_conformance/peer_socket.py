"""A DEALER that blocks and sends whatever it is told to: for conformance checks and fuzzing."""

from __future__ import annotations

import time
from collections.abc import Sequence

import zmq

from nanocore.protocol.errors import ConfigError
from nanocore.protocol.sockets.curve import ClientKeys
from nanocore.protocol.sockets.libzmq import receive_frames, socket_options


class PeerSocket:
    """One connection to an engine, without the client SDK. Belongs to one thread."""

    def __init__(self, endpoint: str, keys: ClientKeys | None = None) -> None:
        options = socket_options(endpoint, keys)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.LINGER, 200)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"endpoint {endpoint!r} is invalid: {error}") from None

    def send(self, frames: Sequence[bytes]) -> None:
        """Send one message of one or more frames, whatever they hold; waits for room."""
        self._socket.send_multipart(frames)

    def receive(self, timeout_s: float) -> list[bytes] | None:
        """The frames of the next message, or None if none came in time."""
        deadline_s = time.monotonic() + timeout_s
        while (frames := receive_frames(self._socket)) is None:
            wait_s = deadline_s - time.monotonic()
            if wait_s <= 0:
                return None
            self._socket.poll(int(wait_s * 1e3) + 1)
        return frames

    def close(self) -> None:
        """Send what is queued, for at most 0.2 s, and close. Idempotent."""
        self._socket.close()
        self._context.term()
