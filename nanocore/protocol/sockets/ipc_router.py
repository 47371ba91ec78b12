"""IpcRouter: ZMTP over a Unix socket for the binding side; the counterpart of libzmq's ROUTER.

One thread, no locks: `wait` sleeps in epoll, `receive` looks at one connection after the other, a
bounded piece at a time, and `send` writes at once what the peer's socket takes. libzmq does not
bound what a peer may make it keep, and ends the process when descriptors run out. Here a message,
all unfinished messages together, what is queued for a peer and for all of them, and the number of
connections are bounded. A connection that exceeds a limit is closed. Routing ids are ours, each
used once.
"""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from nanocore.protocol.errors import AddressInUseError, ConfigError, ProtocolError
from nanocore.protocol.sockets.options import (
    BACKLOG,
    HANDSHAKE_S,
    LINGER_S,
    MAX_CONNECTIONS,
    MAX_INPUT_BYTES,
    MAX_OUTPUT_BYTES,
    PEER_HIGH_WATER_MARK,
    SendResult,
)
from nanocore.protocol.sockets.zmtp import ROUTER, Buffer, Role, ZmtpReader, pack_message


class IpcConnection:
    """An accepted connection of an IpcRouter; the greeting waits to be written. Nothing blocks.

    num_bytes: of its unfinished message, when it was last looked at. num_unsent_bytes: of what
    waits for it. has_more: the last read left
    something behind. is_queued: it is among those to be looked at. waits_for_room: the poller is to
    say when the peer takes more.
    """

    __slots__ = (
        "fd", "has_more", "is_queued", "num_bytes", "num_unsent_bytes", "reader", "routing_id",
        "socket", "unsent", "waits_for_room",
    )  # fmt: skip

    def __init__(self, accepted: socket.socket, routing_id: bytes, role: Role) -> None:
        accepted.setblocking(False)
        self.socket = accepted
        self.fd = accepted.fileno()
        self.routing_id = routing_id
        self.reader = ZmtpReader(role)
        self.num_bytes = 0
        self.num_unsent_bytes = len(role.greeting)
        self.has_more = self.is_queued = self.waits_for_room = False
        self.unsent: deque[list[Buffer]] = deque([[role.greeting]])

    def read(self, scratch: memoryview) -> bool:
        """Read what has arrived; return False if there was nothing.

        Raises:
            OSError: the peer is gone.
        """
        try:
            num_bytes = self.socket.recv_into(scratch)
        except BlockingIOError:
            self.has_more = False
            return False
        if not num_bytes:
            raise ConnectionResetError
        self.has_more = num_bytes == len(scratch)
        self.reader.feed(scratch[:num_bytes])
        return True

    def append(self, buffers: list[Buffer]) -> int:
        """Queue a message for the peer; return its bytes."""
        num_bytes = sum(map(len, buffers))
        self.unsent.append(buffers)
        self.num_unsent_bytes += num_bytes
        return num_bytes

    def write(self) -> None:
        """Send what the peer takes now.

        Raises:
            OSError: the peer is gone.
        """
        unsent = self.unsent
        while unsent:
            buffers = unsent[0]
            try:
                num_sent = self.socket.sendmsg(buffers)
            except BlockingIOError:
                return
            self.num_unsent_bytes -= num_sent
            while buffers and num_sent >= len(buffers[0]):
                num_sent -= len(buffers.pop(0))
            if buffers:
                buffers[0] = memoryview(buffers[0])[num_sent:]
            else:
                unsent.popleft()


_READ_BYTES: Final = 2**18  # more than a sender's socket holds by default
_MAX_LOOKS: Final = 16  # at connections by one `receive`
_SWEEP_INTERVAL_S: Final = 1.0
_NO_ROOM: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_IN, _OUT = select.EPOLLIN, select.EPOLLOUT


class IpcRouter:
    """The `EngineSocket` of ipc; bound at construction.

    high_water_mark: messages that may wait for one peer. connections: those that are open, by
    routing id; num_accepted: all that ever were. num_input_bytes: of all unfinished messages.
    num_output_bytes: of all that waits for peers.

    Raises:
        ConfigError: it cannot be bound. AddressInUseError: there is a socket already.
    """

    def __init__(
        self, path: Path, role: Role = ROUTER, high_water_mark: int = PEER_HIGH_WATER_MARK
    ) -> None:
        self._role = role
        self._high_water_mark = high_water_mark
        self.max_connections = MAX_CONNECTIONS
        self.unadmitted_timeout_s = math.inf
        self._path = path
        self._listener = _listen(path)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, _IN)
        self._is_accepting = True
        self._watched: set[int] = set()
        self.connections: dict[bytes, IpcConnection] = {}
        self._by_fd: dict[int, IpcConnection] = {}
        self._unadmitted_s: dict[bytes, float] = {}  # since when, the oldest first
        self._ready: deque[IpcConnection] = deque()
        self._gone: list[bytes] = []
        self.num_accepted = 0
        self.num_input_bytes = 0
        self.num_output_bytes = 0
        self._scratch = memoryview(bytearray(_READ_BYTES))
        self._num_looks = 0  # until it is time to see who else has sent something
        self._next_sweep_s = 0.0

    def fileno(self) -> int:
        """A descriptor that is readable when something has arrived or more can be sent."""
        return self._epoll.fileno()

    @property
    def is_busy(self) -> bool:
        """Whether something has arrived that `receive` has not looked at."""
        return bool(self._ready)

    def limit(self, max_connections: int, unadmitted_timeout_s: float) -> None:
        """Set the number of connections, and the time that one without a session may stay."""
        self.max_connections = max_connections
        self.unadmitted_timeout_s = unadmitted_timeout_s

    def watch(self, fd: int) -> None:
        """Let `wait` return when this descriptor becomes readable, too."""
        self._watched.add(fd)
        self._epoll.register(fd, _IN)

    def wait(self, timeout_ms: int) -> set[int]:
        """Sleep until something is ready; return the ready watched descriptors. -1: no limit."""
        deadline_s = time.monotonic() + timeout_ms / 1e3 if timeout_ms > 0 else 0.0
        timeout_s = 0.0 if self._ready else timeout_ms / 1e3 if timeout_ms >= 0 else None
        while True:
            watched = self._poll(timeout_s)
            if deadline_s:
                timeout_s = max(0.0, deadline_s - time.monotonic())
            if watched or self._ready or timeout_s == 0.0:
                self._num_looks = max(1, len(self._ready))
                return watched

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """Return (routing id, frames) of the next message, or None when there is none now.

        Frames beyond the limit are dropped. A call never takes long: it may return None while
        `is_busy`.
        """
        if not self._num_looks:
            self._poll(0.0)
            self._num_looks = max(_MAX_LOOKS, len(self._ready))
        for _ in range(min(_MAX_LOOKS, self._num_looks)):
            if not self._ready:
                self._num_looks = 0
                break
            self._num_looks -= 1
            connection = self._ready.popleft()
            connection.is_queued = False
            frames = self._look(connection)
            if frames is not None:
                return connection.routing_id, frames
        return None

    def send(self, routing_id: bytes, frames: Sequence[bytes]) -> SendResult:
        """Queue a message for one client; never blocks."""
        connection = self.connections.get(routing_id)
        if connection is None:
            return SendResult.GONE
        unsent = connection.unsent
        if len(unsent) >= self._high_water_mark:
            if not self._write(connection):
                return SendResult.GONE
            if len(unsent) >= self._high_water_mark:
                return SendResult.FULL
        self.num_output_bytes += connection.append(pack_message(frames))
        if len(unsent) == 1 and not self._write(connection):
            return SendResult.GONE
        if self.num_output_bytes > MAX_OUTPUT_BYTES:
            self.drop(max(self.connections.values(), key=lambda one: one.num_unsent_bytes))
        return SendResult.SENT if routing_id in self.connections else SendResult.GONE

    def take_gone(self) -> list[bytes]:
        """Return the admitted peers that have disconnected since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def is_admin(self, routing_id: bytes) -> bool:
        """Whether the peer has the role admin."""
        return True  # who can open the socket is the engine's own user

    def admit(self, routing_id: bytes) -> None:
        self._unadmitted_s.pop(routing_id, None)

    def dismiss(self, routing_id: bytes) -> None:
        if routing_id in self.connections:
            self._unadmitted_s.setdefault(routing_id, time.monotonic())

    def close(self) -> None:
        """Send what is queued, for at most a second, and close. Idempotent."""
        if self._epoll.closed:
            return
        self._path.unlink(missing_ok=True)
        self._listener.close()
        deadline_s = time.monotonic() + LINGER_S
        for connection in list(self.connections.values()):
            if connection.unsent:
                self._epoll.modify(connection.fd, _OUT)
            else:
                self.drop(connection)
        while self.connections and (left_s := deadline_s - time.monotonic()) > 0:
            for fd, _ in self._epoll.poll(left_s):
                closing = self._by_fd.get(fd)
                if closing is None:
                    self._epoll.unregister(fd)  # one that was watched
                elif self._write(closing) and not closing.unsent:
                    self.drop(closing)
        for connection in list(self.connections.values()):
            self.drop(connection)
        self._epoll.close()

    def _poll(self, timeout_s: float | None) -> set[int]:
        """Sleep, write what can be written, queue readable connections; return ready watched
        descriptors.
        """
        watched = set()
        for fd, events in self._epoll.poll(timeout_s):
            connection = self._by_fd.get(fd)
            if connection is not None:
                if events & _OUT and not self._write(connection):
                    continue
                if not events & ~_OUT:
                    continue
                if not connection.reader.is_ready:
                    self._look(connection)  # a handshake has no message
                elif not connection.is_queued:
                    connection.is_queued = True
                    self._ready.append(connection)
            elif fd == self._listener.fileno():
                self._accept()
            elif fd in self._watched:
                watched.add(fd)
        now_s = time.monotonic()
        if now_s >= self._next_sweep_s:
            self._next_sweep_s = now_s + _SWEEP_INTERVAL_S
            self._sweep(now_s)
        return watched

    def _accept(self) -> None:
        for _ in range(BACKLOG):
            if len(self.connections) >= self.max_connections and not self._make_room():
                return
            try:
                accepted, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_ROOM and not self._make_room():
                    return
                continue  # or the peer has left already
            self.num_accepted += 1
            connection = IpcConnection(accepted, self.num_accepted.to_bytes(8, "big"), self._role)
            self.num_output_bytes += connection.num_unsent_bytes
            self.connections[connection.routing_id] = connection
            self._by_fd[connection.fd] = connection
            self._unadmitted_s.setdefault(connection.routing_id, time.monotonic())
            self._epoll.register(connection.fd, _IN)
            self._write(connection)

    def _make_room(self) -> bool:
        """Close the oldest connection without a session; if none, accept nothing until a sweep."""
        oldest = next(iter(self._unadmitted_s), None)
        if oldest is None:
            if self._is_accepting:
                self._is_accepting = False
                self._epoll.unregister(self._listener)
            return False
        self.drop(self.connections[oldest])
        return True

    def _sweep(self, now_s: float) -> None:
        """Close connections that stay too long without a session, and accept again."""
        for routing_id, since_s in list(self._unadmitted_s.items()):
            is_ready = self.connections[routing_id].reader.is_ready
            limit_s = self.unadmitted_timeout_s
            if now_s - since_s > (limit_s if is_ready else min(limit_s, HANDSHAKE_S)):
                self.drop(self.connections[routing_id])
        if not self._is_accepting:
            self._is_accepting = True
            self._epoll.register(self._listener, _IN)

    def _look(self, connection: IpcConnection) -> list[bytes] | None:
        """Return the connection's next message, if a bounded effort finds one."""
        reader = connection.reader
        try:
            if reader.is_drained and not connection.read(self._scratch):
                return None
            frames = reader.next_message()
        except (ProtocolError, OSError):
            self.drop(connection)
            return None
        if reader.answers and not self._answer(connection):
            return None
        if reader.is_drained and (frames is None or connection.num_bytes):
            self._count(connection)
        if connection.fd in self._by_fd and (connection.has_more or not reader.is_drained):
            connection.is_queued = True
            self._ready.append(connection)
        return frames

    def _answer(self, connection: IpcConnection) -> bool:
        """Send the handshake's reply, or a PONG unless much is queued; return False if the peer is
        gone.
        """
        answer = b"".join(connection.reader.answers)
        connection.reader.answers.clear()
        if len(connection.unsent) >= self._high_water_mark:
            return True
        self.num_output_bytes += connection.append([answer])
        return self._write(connection)

    def _count(self, connection: IpcConnection) -> None:
        """Count the unfinished message; if all together take too much, drop the largest."""
        num_bytes = connection.reader.num_bytes
        self.num_input_bytes += num_bytes - connection.num_bytes
        connection.num_bytes = num_bytes
        if self.num_input_bytes > MAX_INPUT_BYTES:
            self.drop(max(self.connections.values(), key=lambda one: one.num_bytes))

    def _write(self, connection: IpcConnection) -> bool:
        """Send what the peer takes now and poll for the rest; return False if the peer is gone."""
        before = connection.num_unsent_bytes
        try:
            connection.write()
        except OSError:
            self.num_output_bytes -= before - connection.num_unsent_bytes
            self.drop(connection)
            return False
        self.num_output_bytes -= before - connection.num_unsent_bytes
        if bool(connection.unsent) is not connection.waits_for_room:
            connection.waits_for_room = not connection.waits_for_room
            self._epoll.modify(connection.fd, _IN | _OUT if connection.waits_for_room else _IN)
        return True

    def drop(self, connection: IpcConnection) -> None:
        """Close a connection. Messages that it had sent and nobody has looked at are lost."""
        del self.connections[connection.routing_id], self._by_fd[connection.fd]
        if self._unadmitted_s.pop(connection.routing_id, None) is None:
            self._gone.append(connection.routing_id)
        if connection.is_queued:
            self._ready.remove(connection)
        self.num_input_bytes -= connection.num_bytes
        self.num_output_bytes -= connection.num_unsent_bytes
        self._epoll.unregister(connection.fd)
        connection.socket.close()


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    old_umask = os.umask(0o077)  # the socket file's mode follows it
    try:
        listener.bind(os.fspath(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(
                f"endpoint ipc://{path} is in use by another process: stop it, or choose another"
            ) from None
        raise ConfigError(f"endpoint 'ipc://{path}' cannot be bound: {error.strerror}") from None
    finally:
        os.umask(old_umask)
    return listener
