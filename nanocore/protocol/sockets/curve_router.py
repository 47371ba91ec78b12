"""CurveRouter: libzmq's ROUTER for endpoints with keys, the authentication, and the guard."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import zmq
from zmq.auth.thread import ThreadAuthenticator

from nanocore.protocol.endpoint import TCP
from nanocore.protocol.errors import AddressInUseError, ConfigError, KeyFileError
from nanocore.protocol.sockets.curve import ZAP_DOMAIN, EngineKeys, load_public_key
from nanocore.protocol.sockets.libzmq import send_frames, socket_options
from nanocore.protocol.sockets.options import (
    BACKLOG,
    LINGER_S,
    MAX_FRAMES,
    PEER_HIGH_WATER_MARK,
    SendResult,
)
from nanocore.protocol.sockets.tcp_guard import SWEEP_INTERVAL_S, TcpGuard

logger = logging.getLogger(__name__)


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


_MAX_SKIPPED_FRAMES: Final = 1000  # by one call; about a millisecond
_NO_WAIT: Final = int(zmq.NOBLOCK)


class CurveRouter:
    """Implements `EngineSocket` with keys; bound at construction. On ipc it has no guard.

    Raises:
        ConfigError: it cannot be bound. AddressInUseError: another process listens there.
    """

    def __init__(self, endpoint: str, keys: EngineKeys | None) -> None:
        options = socket_options(endpoint, keys)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.LINGER, int(LINGER_S * 1e3))
        self._socket.setsockopt(zmq.BACKLOG, BACKLOG)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, PEER_HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, PEER_HIGH_WATER_MARK)
        self._admins = None if keys is None else keys.admins
        self.authenticator: ClientAuthenticator | None = None
        if keys is not None:
            self.authenticator = ClientAuthenticator(self._context, keys.clients)
        self._guard = TcpGuard(self._socket) if endpoint.startswith(TCP) else None
        self._is_cut = False  # the rest of a message with too many frames is still to be skipped
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._bind(endpoint)

    def _bind(self, endpoint: str) -> None:
        old_umask = os.umask(0o077)  # the socket file's mode follows it
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
        finally:
            os.umask(old_umask)

    def limit(self, max_connections: int, unadmitted_timeout_s: float) -> None:
        if self._guard is not None:
            self._guard.max_connections = max_connections
            self._guard.unadmitted_timeout_s = unadmitted_timeout_s

    def watch(self, fd: int) -> None:
        self._poller.register(fd, zmq.POLLIN)

    @property
    def is_busy(self) -> bool:
        return self._is_cut

    def wait(self, timeout_ms: int) -> set[int]:
        end_s = math.inf if timeout_ms < 0 else time.monotonic() + timeout_ms / 1e3
        while True:
            if self.authenticator is not None:
                self.authenticator.check()
            if self._guard is not None:
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
        if self._guard is not None:
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

    def take_gone(self) -> list[bytes]:
        return [] if self._guard is None else self._guard.take_gone()

    def is_admin(self, routing_id: bytes) -> bool:
        if self._guard is None or self._admins is None:  # ipc
            return True
        try:
            return name_of(self._admins, self._guard.key_of(routing_id)) is not None
        except FileNotFoundError:
            return False
        except OSError as error:
            logger.warning("no client is an administrator: %s", error)
            return False

    def admit(self, routing_id: bytes) -> None:
        if self._guard is not None:
            self._guard.admit(routing_id)

    def dismiss(self, routing_id: bytes) -> None:
        if self._guard is not None:
            self._guard.dismiss(routing_id)

    def close(self) -> None:
        if self._guard is not None:
            self._guard.close()
        self._socket.close()
        if self.authenticator is not None:
            self.authenticator.close()
        self._context.term()
