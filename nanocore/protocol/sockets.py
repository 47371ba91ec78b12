"""The two sockets of the protocol, and the only place that imports zmq.

The engine binds one ROUTER; clients are DEALERs. The options are those that reliability needs:
ROUTER_MANDATORY, so that a full or vanished peer is an answer instead of a silent loss; finite
high-water marks; a frame size limit; never ROUTER_HANDOVER, which would give one client's replies
to another. Two that suggest themselves are left alone: ZMTP heartbeats, because libzmq 4.3.5 aborts
the process when one falls due on a broken connection whose reading is held up (libzmq #4364; our
own PING does their work); and IMMEDIATE on clients, because it throws away what was received and
not yet read when the engine goes: its last words.
"""

from __future__ import annotations

import asyncio
import enum
import os
from collections.abc import Sequence
from typing import Final

import zmq
import zmq.asyncio

from nanocore.protocol.errors import ConfigError

MAX_FRAME_BYTES: Final = 16 * 2**20
_HIGH_WATER_MARK: Final = 1000
_OPTIONS: Final = {
    zmq.SNDHWM: _HIGH_WATER_MARK,
    zmq.RCVHWM: _HIGH_WATER_MARK,
    zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
    zmq.HANDSHAKE_IVL: 2000,
}


class SendResult(enum.Enum):
    """What became of a message to one client."""

    SENT = "sent"
    FULL = "full"  # the client does not read: its queue is at the high-water mark
    GONE = "gone"  # no such peer any more


class EngineSocket:
    """The engine's ROUTER. Belongs to one thread, the io thread."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in _OPTIONS.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 1000)  # last words reach clients, but not forever
        self._socket.setsockopt(zmq.BACKLOG, 128)
        old_umask = os.umask(0o077)  # the socket file's mode follows it
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"endpoint {endpoint!r} cannot be bound: {error}") from None
        finally:
            os.umask(old_umask)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def watch(self, fd: int) -> None:
        """Let `wait` return when this file descriptor becomes readable, too."""
        self._poller.register(fd, zmq.POLLIN)

    def wait(self, timeout_ms: int) -> set[int]:
        """Sleep until a message or a watched descriptor is ready; returns the ready descriptors."""
        return {ready for ready, _ in self._poller.poll(timeout_ms) if isinstance(ready, int)}

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """(routing id, frames) of the next message, or None when there is none now."""
        try:
            routing_id, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return routing_id, frames

    def send(self, routing_id: bytes, frames: Sequence[bytes]) -> SendResult:
        """Queue a message for one client; never blocks."""
        try:
            self._socket.send_multipart([routing_id, *frames], zmq.NOBLOCK)
        except zmq.Again:
            return SendResult.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return SendResult.GONE
        return SendResult.SENT

    def close(self) -> None:
        """Send what is queued, for at most a second, and close."""
        self._socket.close()
        self._context.term()


class ClientSocket:
    """A client's DEALER, for use inside one asyncio event loop."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in _OPTIONS.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.LINGER, 200)  # an ABORT or BYE just sent still leaves
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"endpoint {endpoint!r} is none: {error}") from None

    async def send(self, frames: Sequence[bytes]) -> None:
        """Send one message; waits while the queue to the engine is full."""
        await self._socket.send_multipart(list(frames))

    def post(self, frames: Sequence[bytes]) -> None:
        """Send one message without waiting for it: for aborts and pongs, from any callback."""
        future = asyncio.ensure_future(self._socket.send_multipart(list(frames)))
        # Closing the socket cancels what has not left; nobody is there to be told.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def receive(self) -> list[bytes]:
        """The frames of the next message."""
        return await self._socket.recv_multipart()

    def close(self) -> None:
        """Close at once. Idempotent."""
        if not self._socket.closed:
            self._socket.close()
            self._context.term()
