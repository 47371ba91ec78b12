"""A client's DEALER inside asyncio."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Sequence
from typing import Final

import zmq

from nanocore.protocol.endpoint import TCP
from nanocore.protocol.errors import ConfigError, EngineDeadError
from nanocore.protocol.sockets.curve import ClientKeys
from nanocore.protocol.sockets.libzmq import receive_frames, send_frames, socket_options

_EVENTS: Final = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
)
_MONITOR_EVENT: Final = struct.Struct("=Hi")
"""First frame of a monitor's message: event and value. zmq.utils.monitor imports zmq.asyncio."""


class ConnectionLostError(EngineDeadError):
    """The connection is lost, and everything that had arrived over it was received.

    refused: there never was one, because nobody listens.
    """

    def __init__(self, refused: bool) -> None:
        super().__init__("nobody listens" if refused else "the connection to the engine was closed")
        self.refused = refused


class ClientSocket:
    """A client's DEALER, for use inside one asyncio event loop, with one receiver.

    One socket is one connection: until there is one ZeroMQ goes on trying, unless it is not to be
    patient; once there was one, its end is the socket's (`receive` says so, after the last message
    of the engine), although ZeroMQ would connect again and send there what was meant for the last.

    Sits directly on libzmq's descriptor: zmq.asyncio makes several futures and timers per message.
    The descriptor tells once that something has happened, and any call on the socket may use that
    up. So whoever wants something tries first, and while anyone waits, every call is followed by a
    look at what the socket is ready for now (`_look`).

    keys: for an engine that asks for them; TCP endpoints need them.
    patient: whether to wait for somebody to listen at the endpoint.
    is_tcp: whether it crosses a network, whose end is silence. is_accepted: whether somebody
    listens, or did, even if no ZeroMQ handshake has succeeded. is_connected: whether there is, or
    was, a connection.
    """

    def __init__(
        self, endpoint: str, keys: ClientKeys | None = None, *, patient: bool = True
    ) -> None:
        options = socket_options(endpoint, keys)
        self.is_tcp = endpoint.startswith(TCP)
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
        self._patient = patient
        self.is_accepted = self.is_connected = False
        self._lost: ConnectionLostError | None = None
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(_EVENTS)
        self._monitor_fd: int = self._monitor.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._loop.add_reader(self._monitor_fd, self._take_events)
        self._loop.add_reader(self._fd, self._look)
        self._take_events()  # its descriptor tells nothing to those who have not tried
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"endpoint {endpoint!r} is invalid: {error}") from None

    def send_nowait(self, frames: Sequence[bytes]) -> bool:
        """Send one message if that needs no waiting; return whether it was sent."""
        sent = not self._unsent and self._try_send(frames)
        if self._readable is not None:
            self._look()
        return sent

    async def send(self, frames: Sequence[bytes]) -> None:
        """Send one message; wait while the queue to the engine is full."""
        if not self.send_nowait(frames):
            await self._queue(frames)

    def post(self, frames: Sequence[bytes]) -> None:
        """Queue one message without waiting: for aborts and pongs, from any callback."""
        if not self.send_nowait(frames):
            self._queue(frames)  # closing the socket forgets what has not left

    def receive_nowait(self) -> list[bytes] | None:
        """Return the frames of the next message, or None when there is none now."""
        frames = receive_frames(self._socket)
        if self._unsent:
            self._look()
        return frames

    async def receive(self) -> list[bytes]:
        """Return the frames of the next message.

        Raises:
            ConnectionLostError: there will be none.
        """
        while (frames := self.receive_nowait()) is None:
            if self._lost is not None:
                raise self._lost
            assert self._readable is None, "a socket has one receiver"
            self._readable = self._loop.create_future()
            self._look()
            try:
                await self._readable
            finally:
                self._readable = None
        return frames

    def close(self) -> None:
        """Close at once, even if the event loop is closed already. Idempotent."""
        if not self._socket.closed:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._fd)
                self._loop.remove_reader(self._monitor_fd)
            self._unsent.clear()
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close(0 if self._lost else None)
            self._context.term()

    def _take_events(self) -> None:
        while self._lost is None:
            try:
                head, _ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event, _ = _MONITOR_EVENT.unpack(head)
            if event == zmq.EVENT_CONNECTED:
                self.is_accepted = True
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_connected = True
            elif self.is_connected or not self._patient:
                self._lost = ConnectionLostError(refused=event == zmq.EVENT_CONNECT_RETRIED)
        self._loop.remove_reader(self._monitor_fd)
        if self._readable is not None and not self._readable.done():
            self._readable.set_result(None)

    def _queue(self, frames: Sequence[bytes]) -> asyncio.Future[None]:
        """Queue a message; cancelling the future takes it back."""
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
