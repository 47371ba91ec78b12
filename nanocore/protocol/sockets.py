"""The sockets of the protocol, and the only place that imports zmq.

The engine binds one ROUTER; clients are DEALERs. KV cache events, if asked for, have a PUB and, to
replay them, a ROUTER of their own. The options are those that reliability needs:
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
from collections import deque
from collections.abc import Sequence
from typing import Final

import zmq

from nanocore.protocol.errors import ConfigError

MAX_FRAME_BYTES: Final = 16 * 2**20
_HIGH_WATER_MARK: Final = 1000
_OPTIONS: Final = {
    zmq.SNDHWM: _HIGH_WATER_MARK,
    zmq.RCVHWM: _HIGH_WATER_MARK,
    zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
    zmq.HANDSHAKE_IVL: 2000,
}


# As integers: combining pyzmq's enums costs more than sending a small frame.
_LAST_FRAME: Final = int(zmq.NOBLOCK)
_MORE_FRAMES: Final = int(zmq.NOBLOCK | zmq.SNDMORE)


class SendResult(enum.Enum):
    """What became of a message to one client."""

    SENT = "sent"
    FULL = "full"  # the client does not read: its queue is at the high-water mark
    GONE = "gone"  # no such peer any more


class _BoundSocket:
    """A socket at an ipc endpoint, in a context of its own, and a poller to sleep in."""

    def __init__(self, kind: int, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        for option, value in _OPTIONS.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.LINGER, 1000)  # last words reach clients, but not forever
        self._socket.setsockopt(zmq.BACKLOG, 128)
        if kind == zmq.ROUTER:
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
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

    def watch(self, source: int | _BoundSocket) -> None:
        """Let `wait` return when this descriptor or socket becomes readable, too."""
        watched = source._socket if isinstance(source, _BoundSocket) else source
        self._poller.register(watched, zmq.POLLIN)

    def wait(self, timeout_ms: int) -> set[int]:
        """Sleep until something watched is ready; returns the ready descriptors. -1: no limit."""
        return {ready for ready, _ in self._poller.poll(timeout_ms) if isinstance(ready, int)}

    def close(self) -> None:
        """Send what is queued, for at most a second, and close."""
        self._socket.close()
        self._context.term()


class EngineSocket(_BoundSocket):
    """An engine's ROUTER: for clients, or for replays. Belongs to one thread."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(zmq.ROUTER, endpoint)

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """(routing id, frames) of the next message, or None when there is none now."""
        message = _receive(self._socket)
        return None if message is None else (message[0], message[1:])

    def send(self, routing_id: bytes, frames: Sequence[bytes]) -> SendResult:
        """Queue a message for one client; never blocks."""
        try:
            _send(self._socket, [routing_id, *frames])
        except zmq.Again:
            return SendResult.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return SendResult.GONE
        return SendResult.SENT


class PublisherSocket(_BoundSocket):
    """The engine's PUB. Belongs to one thread; `wait` also takes in subscriptions."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(zmq.PUB, endpoint)

    def publish(self, frames: Sequence[bytes]) -> None:
        """Queue a message for every subscriber; those at the high-water mark miss it."""
        _send(self._socket, frames)


class ClientSocket:
    """A client's DEALER, for use inside one asyncio event loop, with one receiver.

    Sits directly on libzmq's descriptor: zmq.asyncio makes several futures and timers per message.
    The descriptor tells once that something has happened, and any call on the socket may use that
    up. So whoever wants something tries first, and while anyone waits, every call is followed by a
    look at what the socket is ready for now (`_look`).
    """

    def __init__(self, endpoint: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._fd: int = self._socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._readable: asyncio.Future[None] | None = None  # the receiver, waiting
        self._unsent: deque[tuple[Sequence[bytes], asyncio.Future[None]]] = deque()
        for option, value in _OPTIONS.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.LINGER, 200)  # an ABORT or BYE just sent still leaves
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._loop.add_reader(self._fd, self._look)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"endpoint {endpoint!r} is none: {error}") from None

    def send_nowait(self, frames: Sequence[bytes]) -> bool:
        """Send one message if that needs no waiting; whether it was sent."""
        sent = not self._unsent and self._try_send(frames)
        if self._readable is not None:
            self._look()
        return sent

    async def send(self, frames: Sequence[bytes]) -> None:
        """Send one message; waits while the queue to the engine is full."""
        if not self.send_nowait(frames):
            await self._queue(frames)

    def post(self, frames: Sequence[bytes]) -> None:
        """Send one message without waiting for it: for aborts and pongs, from any callback."""
        if not self.send_nowait(frames):
            self._queue(frames)  # closing the socket forgets what has not left

    def receive_nowait(self) -> list[bytes] | None:
        """The frames of the next message, or None when there is none now."""
        frames = _receive(self._socket)
        if self._unsent:
            self._look()
        return frames

    async def receive(self) -> list[bytes]:
        """The frames of the next message."""
        while (frames := self.receive_nowait()) is None:
            assert self._readable is None, "a socket has one receiver"
            self._readable = self._loop.create_future()
            self._look()
            try:
                await self._readable
            finally:
                self._readable = None
        return frames

    def close(self) -> None:
        """Close at once. Idempotent."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._unsent.clear()
            self._socket.close()
            self._context.term()

    def _queue(self, frames: Sequence[bytes]) -> asyncio.Future[None]:
        """Let a message wait for its turn; cancelling the future takes it back."""
        sent: asyncio.Future[None] = self._loop.create_future()
        self._unsent.append((frames, sent))
        self._look()
        return sent

    def _look(self) -> None:
        """Act on what the socket is ready for, until it is ready for nothing that is wanted."""
        while True:
            events: int = self._socket.getsockopt(zmq.EVENTS)  # type: ignore[assignment]
            if events & zmq.POLLIN and self._readable is not None and not self._readable.done():
                self._readable.set_result(None)
            if not (events & zmq.POLLOUT and self._unsent):
                return
            self._send_unsent()

    def _send_unsent(self) -> None:
        while self._unsent:
            frames, sent = self._unsent[0]
            if not sent.cancelled():
                if not self._try_send(frames):
                    return
                sent.set_result(None)
            self._unsent.popleft()

    def _try_send(self, frames: Sequence[bytes]) -> bool:
        try:
            _send(self._socket, frames)
        except zmq.Again:
            return False
        return True


def _send(socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
    """Send one message whole, or raise zmq.Again: only the first frame can find no room."""
    *first, last = frames
    for frame in first:
        socket.send(frame, _MORE_FRAMES)
    socket.send(last, _LAST_FRAME)


def _receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """The frames of the next message, or None when there is none now."""
    try:
        frame = socket.recv(_LAST_FRAME, copy=False)
    except zmq.Again:
        return None
    frames = [frame.bytes]
    while frame.more:  # a message arrives whole
        frame = socket.recv(_LAST_FRAME, copy=False)
        frames.append(frame.bytes)
    return frames
