"""CurveRouter: libzmq's ROUTER, for endpoints with keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import zmq

from nanocore.protocol.sockets.bound_socket import BoundSocket
from nanocore.protocol.sockets.curve import EngineKeys
from nanocore.protocol.sockets.options import (
    MAX_CONNECTIONS,
    MAX_FRAMES,
    SendResult,
    receive_frames,
    send_frames,
)

_MAX_SKIPPED_FRAMES: Final = 1000  # by one call; about a millisecond


class CurveRouter(BoundSocket):
    """Bound at construction; see `EngineSocket` for its methods."""

    def __init__(self, endpoint: str, keys: EngineKeys | None) -> None:
        self.max_connections = MAX_CONNECTIONS
        self.guest_timeout_s = math.inf
        self._is_cut = False  # the rest of a message with too many frames is still to be skipped
        super().__init__(zmq.ROUTER, endpoint, keys)

    @property
    def is_busy(self) -> bool:
        return self._is_cut

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        if self._is_cut and not self._skip():
            return None
        message = receive_frames(self._socket)
        if message is None:
            return None
        if len(message) == MAX_FRAMES:
            self._is_cut = bool(self._socket.getsockopt(zmq.RCVMORE))
        return message[0], message[1:]

    def _skip(self) -> bool:
        """Throw away frames up to the end of the message; False if that is not reached yet."""
        for _ in range(_MAX_SKIPPED_FRAMES):
            if not self._socket.recv(zmq.NOBLOCK, copy=False).more:
                self._is_cut = False
                return True
        return False

    def send(self, routing_id: bytes, frames: Sequence[bytes]) -> SendResult:
        try:
            send_frames(self._socket, [routing_id, *frames])
        except zmq.Again:
            return SendResult.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return SendResult.GONE
        return SendResult.SENT

    def take_gone(self) -> list[bytes]:
        return []

    def admit(self, routing_id: bytes) -> None: ...

    def dismiss(self, routing_id: bytes) -> None: ...
