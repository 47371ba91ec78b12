"""CurveRouter: libzmq's ROUTER, for endpoints with keys, and what guards its connections."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Final

import zmq

from nanocore.protocol.endpoint import TCP
from nanocore.protocol.sockets.bound_socket import BoundSocket
from nanocore.protocol.sockets.curve import EngineKeys
from nanocore.protocol.sockets.options import MAX_FRAMES, SendResult, send_frames
from nanocore.protocol.sockets.tcp_guard import SWEEP_INTERVAL_S, TcpGuard

_MAX_SKIPPED_FRAMES: Final = 1000  # by one call; about a millisecond
_NO_WAIT: Final = int(zmq.NOBLOCK)


class CurveRouter(BoundSocket):
    """Bound at construction; see `EngineSocket` for its methods. On ipc it has no guard."""

    def __init__(self, endpoint: str, keys: EngineKeys | None) -> None:
        self._is_cut = False  # the rest of a message with too many frames is still to be skipped
        self._guard: TcpGuard | None = None
        super().__init__(zmq.ROUTER, endpoint, keys)
        if endpoint.startswith(TCP):
            self._guard = TcpGuard(self._socket)  # first, so that it sees every connection
        self._bind(endpoint)

    def limit(self, max_connections: int, guest_timeout_s: float) -> None:
        if self._guard is not None:
            self._guard.max_connections = max_connections
            self._guard.guest_timeout_s = guest_timeout_s

    @property
    def is_busy(self) -> bool:
        return self._is_cut

    def wait(self, timeout_ms: int) -> set[int]:
        if self._guard is None:
            return super().wait(timeout_ms)
        end_s = math.inf if timeout_ms < 0 else time.monotonic() + timeout_ms / 1e3
        while True:
            self._guard.sweep()
            left_s = min(SWEEP_INTERVAL_S, max(0.0, end_s - time.monotonic()))
            ready = self._poll(math.ceil(left_s * 1e3))
            if ready or time.monotonic() >= end_s:
                return {source for source in ready if isinstance(source, int)}

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        if self._is_cut and not self._skip():
            return None
        try:
            frame = self._socket.recv(_NO_WAIT, copy=False)
        except zmq.Again:
            return None
        routing_id = frame.bytes
        frames: list[bytes] = []
        while frame.more and len(frames) < MAX_FRAMES - 1:  # a message arrives whole
            frame = self._socket.recv(_NO_WAIT, copy=False)
            frames.append(frame.bytes)
        self._is_cut = frame.more
        if self._guard is not None:
            self._guard.note(routing_id, int(frame.get(zmq.SRCFD)))
        return routing_id, frames

    def _skip(self) -> bool:
        """Throw away frames up to the end of the message; False if that is not reached yet."""
        for _ in range(_MAX_SKIPPED_FRAMES):
            if not self._socket.recv(_NO_WAIT, copy=False).more:
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
        return [] if self._guard is None else self._guard.take_gone()

    def admit(self, routing_id: bytes) -> None:
        if self._guard is not None:
            self._guard.admit(routing_id)

    def dismiss(self, routing_id: bytes) -> None:
        if self._guard is not None:
            self._guard.dismiss(routing_id)

    def close(self) -> None:
        if self._guard is not None:
            self._guard.close()
        super().close()
