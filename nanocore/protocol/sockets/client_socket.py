"""A client's DEALER inside asyncio."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import zmq

from nanocore.protocol.errors import ConfigError
from nanocore.protocol.sockets.curve import ClientKeys
from nanocore.protocol.sockets.options import receive_frames, send_frames, socket_options


class ClientSocket:
    """A client's DEALER, for use inside one asyncio event loop, with one receiver.

    Sits directly on libzmq's descriptor: zmq.asyncio makes several futures and timers per message.
    The descriptor tells once that something has happened, and any call on the socket may use that
    up. So whoever wants something tries first, and while anyone waits, every call is followed by a
    look at what the socket is ready for now (`_look`).

    keys: for an engine that asks for them; TCP endpoints need them.
    """

    def __init__(self, endpoint: str, keys: ClientKeys | None = None) -> None:
        options = socket_options(endpoint, keys)
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._fd: int = self._socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._readable: asyncio.Future[None] | None = None  # the receiver, waiting
        self._unsent: deque[tuple[Sequence[bytes], asyncio.Future[None]]] = deque()
        for option, value in options.items():
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
        frames = receive_frames(self._socket)
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
            send_frames(self._socket, frames)
        except zmq.Again:
            return False
        return True
