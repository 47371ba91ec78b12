"""CurveRouter: libzmq's ROUTER for TCP with keys, the authentication, and the guard."""

from __future__ import annotations

import logging
import math
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from nanocore.protocol.errors import AddressInUseError, ConfigError, KeyFileError
from nanocore.protocol.sockets.curve import ZAP_DOMAIN, EngineKeys, load_public_key
from nanocore.protocol.sockets.libzmq import send_frames, socket_options
from nanocore.protocol.sockets.options import (
    BACKLOG,
    LINGER_S,
    MAX_CONNECTIONS,
    MAX_FRAME_BYTES,
    MAX_FRAMES,
    PEER_HIGH_WATER_MARK,
    SendResult,
)

logger = logging.getLogger(__name__)

MAX_STALLED_BYTES: Final = 4 * MAX_FRAME_BYTES
"""Received of a peer since it delivered a message: twice the largest message, twice."""
SWEEP_INTERVAL_S: Final = 0.1
MAX_UNANSWERED_S: Final = 1.8
"""Since something was sent; with PINGs every second a peer's machine is missed within 3 s."""
_TCP_INFO_BYTES: Final = 192
_TCP_INFO: Final = struct.Struct("=3xB20xI16xI8xI68xQ")
"""Linux's struct tcp_info: probes, unacked, last_data_sent, last_ack_recv, bytes_received."""
_MIN_PROBES: Final = 2
"""Probes of a closed window; a single one may have been answered too soon after another."""
_MAX_SKIPPED_FRAMES: Final = 1000  # by one call; about a millisecond
_NO_WAIT: Final = int(zmq.NOBLOCK)


class ClientAllowList:
    """The allow-list of clients: a folder with a NAME.key for each. Used by a thread of
    zmq.auth.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last_refused = b""

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether a client with this public key, Z85 text, is allowed. zmq.auth prescribes the
        name.
        """
        try:
            name = name_of(self._folder, key)
        except Exception:  # it would end the thread that asks; whatever it is, the answer is no
            logger.exception("the allow-list %s cannot be read: refusing a client", self._folder)
            return False
        if name is not None:
            logger.info("client %r is authenticated", name)
        elif key != self._last_refused:  # it tries again and again: say it once
            self._last_refused = key
            logger.warning(
                "a client is refused: no file in %s has its key %s", self._folder, key.decode()
            )
        return name is not None


def name_of(folder: Path, key: bytes) -> str | None:
    """Return the name of the file in a folder that holds this public key, Z85 text, or None."""
    for path in sorted(folder.iterdir()):
        if path.suffix != ".key":
            continue
        try:
            if load_public_key(path) == key:
                return path.stem
        except KeyFileError as error:  # one bad file shuts out one client
            logger.warning("%s", error)
    return None


class ClientAuthenticator:
    """A running ZAP handler, which tells libzmq whether a client's key is on the allow-list.

    The allow-list is read at every handshake, so a key that is added or removed counts from the
    next handshake on; open connections stay open. While the thread does not answer, nobody is
    admitted (`EngineKeys.options`); its death is an error of the socket (`check`).
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], clients: Path) -> None:
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.configure_curve_callback(ZAP_DOMAIN, ClientAllowList(clients))
        self._authenticator.start()

    def check(self) -> None:
        """Raise RuntimeError if the thread has died: no client could be authenticated any more."""
        if not self._authenticator.is_alive():
            raise RuntimeError("the thread that checks clients' keys has died")

    def close(self) -> None:
        """End the thread. Idempotent; call after the sockets are closed."""
        if self._authenticator.pipe is not None and not self._authenticator.is_alive():
            self._authenticator.pipe.close()  # `stop` would wait for the dead thread to read it
            self._authenticator.pipe = None  # type: ignore[assignment]  # as zmq.auth does
        self._authenticator.stop()


class CurveRouter:
    """The `EngineSocket` of TCP, with the methods of `IpcRouter`; bound at construction.

    Raises:
        ConfigError: it cannot be bound, or there are no keys. AddressInUseError: another process
            listens there.
    """

    def __init__(self, endpoint: str, keys: EngineKeys | None) -> None:
        options = socket_options(endpoint, keys)
        assert keys is not None, "TCP has keys"
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.LINGER, int(LINGER_S * 1e3))
        self._socket.setsockopt(zmq.BACKLOG, BACKLOG)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, PEER_HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, PEER_HIGH_WATER_MARK)
        self._admins = keys.admins
        self.authenticator = ClientAuthenticator(self._context, keys.clients)
        self._guard = guard = TcpGuard(self._socket)
        self.admit, self.dismiss, self.take_gone = guard.admit, guard.dismiss, guard.take_gone
        self._is_cut = False  # the rest of a message with too many frames is still to be skipped
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            if error.errno == zmq.EADDRINUSE:
                raise AddressInUseError(
                    f"endpoint {endpoint} is in use by another process: stop it, or choose another "
                    "port"
                ) from None
            raise ConfigError(f"endpoint {endpoint!r} cannot be bound: {error}") from None

    def limit(self, max_connections: int, unadmitted_timeout_s: float) -> None:
        self._guard.max_connections = max_connections
        self._guard.unadmitted_timeout_s = unadmitted_timeout_s

    def watch(self, fd: int) -> None:
        self._poller.register(fd, zmq.POLLIN)

    @property
    def is_busy(self) -> bool:
        return self._is_cut

    def wait(self, timeout_ms: int) -> set[int]:
        """See `IpcRouter.wait`; RuntimeError: the thread that authenticates clients has died."""
        end_s = math.inf if timeout_ms < 0 else time.monotonic() + timeout_ms / 1e3
        while True:
            self.authenticator.check()
            self._guard.sweep()
            left_s = min(SWEEP_INTERVAL_S, max(0.0, end_s - time.monotonic()))
            ready = [source for source, _ in self._poller.poll(math.ceil(left_s * 1e3))]
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
        self._guard.note(routing_id, int(frame.get(zmq.SRCFD)), str(frame.get("User-Id")))
        return routing_id, frames

    def _skip(self) -> bool:
        """Skip frames up to the end of the message; return False if it is not reached yet."""
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

    def is_admin(self, routing_id: bytes) -> bool:
        """Whether the peer has the role admin: its key is in admins/."""
        try:
            return name_of(self._admins, self._guard.key_of(routing_id)) is not None
        except FileNotFoundError:
            return False
        except OSError as error:
            logger.warning("no client is an administrator: %s", error)
            return False

    def close(self) -> None:
        self._guard.close()
        self._socket.close()
        self.authenticator.close()
        self._context.term()


@dataclass(frozen=True, slots=True)
class _Received:
    """Received data and acknowledgements of a connection, as the kernel counts them.

    num_bytes: of data. is_owed: whether what was sent last is not acknowledged.

    last_ack_s: seconds since anything was.
    """

    num_bytes: int
    is_owed: bool
    last_ack_s: float


@dataclass(slots=True)
class _Connection:
    """State of a connection.

    has_delivered: a message since the last sweep. num_bytes: received when it last had.

    key: the client's public one, Z85 text.
    unanswered_s: for how long sweeps have found that something was sent and is not acknowledged,
    and that nothing was since the sweep before.
    """

    fd: int
    peer: object
    routing_id: bytes | None = None
    key: str = ""
    has_delivered: bool = False
    num_bytes: int = 0
    unanswered_s: float = 0.0

    def note(self, received: _Received, since_s: float) -> None:
        """Take in what a sweep has seen, since_s after the last one.

        A sweep that comes late counts as one in time: a machine that stood still misses nobody.
        """
        if not received.is_owed or received.last_ack_s <= since_s:
            self.unanswered_s = 0.0
        else:
            self.unanswered_s += min(since_s, 2 * SWEEP_INTERVAL_S)


class TcpGuard:
    """Watches the connections of a bound TCP socket of libzmq, and limits what libzmq does not.

    libzmq gathers a message in memory until its last frame has come, however long that is. But it
    reports the descriptors that it accepts, a message names its descriptor, and the kernel counts
    the bytes received. So the guard shuts down connections that receive without delivering a
    message, connections that stay without a session, and peers whose machines do not acknowledge
    what they are sent (slow readers do acknowledge, and stay). Descriptors remain libzmq's: each is
    borrowed for a moment, and shut down only after its peer was compared. Belongs to the socket's
    thread.
    """

    def __init__(self, watched: zmq.Socket[bytes]) -> None:
        self.max_connections = MAX_CONNECTIONS
        self.unadmitted_timeout_s = math.inf
        self._watched = watched
        self._monitor = watched.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._connections: dict[int, _Connection] = {}
        self._by_routing_id: dict[bytes, _Connection] = {}
        self._unadmitted_s: dict[int, float] = {}  # since when, the oldest first
        self._gone: list[bytes] = []
        self._last_sweep_s = -math.inf

    def note(self, routing_id: bytes, fd: int, key: str = "") -> None:
        """Note a delivered message: its peer, the peer's key, and the descriptor."""
        connection = self._connections.get(fd)
        if connection is None or connection.routing_id not in (None, routing_id):
            self._take_events()  # it has just been accepted
            connection = self._connections.get(fd)
            if connection is None:
                return
        connection.has_delivered = True
        connection.routing_id, connection.key = routing_id, key
        self._by_routing_id[routing_id] = connection

    def key_of(self, routing_id: bytes) -> bytes:
        """Return the public key, Z85 text, of a peer that has delivered something; else b""."""
        connection = self._by_routing_id.get(routing_id)
        return b"" if connection is None else connection.key.encode()

    def admit(self, routing_id: bytes) -> None:
        if (connection := self._by_routing_id.get(routing_id)) is not None:
            self._unadmitted_s.pop(connection.fd, None)

    def dismiss(self, routing_id: bytes) -> None:
        if (connection := self._by_routing_id.get(routing_id)) is not None:
            self._unadmitted_s.setdefault(connection.fd, time.monotonic())

    def take_gone(self) -> list[bytes]:
        gone, self._gone = self._gone, []
        return gone

    def sweep(self) -> None:
        """Check all connections, at most once in SWEEP_INTERVAL_S."""
        now_s = time.monotonic()
        if now_s < self._last_sweep_s + SWEEP_INTERVAL_S:
            return
        elapsed_s, self._last_sweep_s = now_s - self._last_sweep_s, now_s
        self._take_events()
        for connection in list(self._connections.values()):
            received = _received(connection.fd)
            num_bytes = received.num_bytes
            connection.note(received, elapsed_s)
            if connection.unanswered_s > MAX_UNANSWERED_S:
                self._hang_up(connection.fd)
            elif connection.has_delivered or num_bytes < connection.num_bytes:
                connection.has_delivered = False
                connection.num_bytes = num_bytes
            elif num_bytes - connection.num_bytes > MAX_STALLED_BYTES:
                self._hang_up(connection.fd)
        for fd, since_s in list(self._unadmitted_s.items()):
            if now_s - since_s > self.unadmitted_timeout_s:
                self._hang_up(fd)

    def close(self) -> None:
        """Stop watching, before the socket is closed. Idempotent."""
        if not self._monitor.closed:
            self._watched.disable_monitor()
            self._monitor.close()

    def _take_events(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            fd = event["value"]
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._forget(fd)
                with suppress(OSError), _borrowed(fd) as accepted:
                    self._connections[fd] = _Connection(fd, accepted.getpeername())
                    self._unadmitted_s.setdefault(fd, time.monotonic())
                oldest = next(iter(self._unadmitted_s), None)
                if len(self._connections) > self.max_connections and oldest is not None:
                    self._hang_up(oldest)
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._forget(fd)

    def _forget(self, fd: int) -> None:
        """Forget a descriptor that libzmq has closed or reused."""
        connection = self._connections.pop(fd, None)
        if connection is None:
            return
        if connection.routing_id is not None:
            self._by_routing_id.pop(connection.routing_id, None)
            if fd not in self._unadmitted_s:  # only peers with a session are reported
                self._gone.append(connection.routing_id)
        self._unadmitted_s.pop(fd, None)

    def _hang_up(self, fd: int) -> None:
        """Shut the connection down, unless the descriptor belongs to another one by now."""
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as held:
            if held.getpeername() == self._connections[fd].peer:
                held.shutdown(socket.SHUT_RDWR)
        self._forget(fd)


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """Wrap a descriptor of libzmq without closing it."""
    lent = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
    try:
        yield lent
    finally:
        lent.detach()


def _received(fd: int) -> _Received:
    with suppress(OSError), _borrowed(fd) as lent:
        info = lent.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if len(info) >= _TCP_INFO.size:
            num_probes, num_unacked, sent_ms, ack_ms, num_bytes = _TCP_INFO.unpack_from(info)
            # A peer that has no room acknowledges each attempt, and there are fewer and fewer.
            is_owed = num_probes >= _MIN_PROBES or (num_unacked > 0 and sent_ms < ack_ms)
            return _Received(num_bytes, is_owed, ack_ms / 1e3)
    return _Received(0, False, 0.0)
