"""The PUB on which an engine publishes KV cache events."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from nanocore.protocol.sockets.bound_socket import BoundSocket
from nanocore.protocol.sockets.options import send_frames


class PublisherSocket(BoundSocket):
    """The engine's PUB, ipc only. Belongs to one thread; `wait` also takes in subscriptions."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(zmq.PUB, endpoint)
        self._bind(endpoint)

    def publish(self, frames: Sequence[bytes]) -> None:
        """Queue a message for every subscriber; those at the high-water mark miss it."""
        send_frames(self._socket, frames)
