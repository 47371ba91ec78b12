"""The sockets that an engine binds: its ROUTERs and its PUB."""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from typing import Final

import zmq

from nanocore.protocol.errors import AddressInUseError, ConfigError
from nanocore.protocol.sockets.client_authenticator import ClientAuthenticator
from nanocore.protocol.sockets.curve import EngineKeys
from nanocore.protocol.sockets.options import (
    MAX_FRAMES,
    receive_frames,
    send_frames,
    socket_options,
)

PEER_HIGH_WATER_MARK: Final = 128
"""Messages that libzmq keeps for one peer, and of one. For a peer that does not read that is 8 MiB
of the largest, 64 KiB each; of a peer that floods us, more wait on its own side."""
_MAX_SKIPPED_FRAMES: Final = 1000  # by one call; about a millisecond


class SendResult(enum.Enum):
    """What became of a message to one client."""

    SENT = "sent"
    FULL = "full"  # the client does not read: its queue is at the high-water mark
    GONE = "gone"  # no such peer any more


class _BoundSocket:
    """A socket at an endpoint, in a context of its own, and a poller to sleep in."""

    def __init__(self, kind: int, endpoint: str, keys: EngineKeys | None = None) -> None:
        options = socket_options(endpoint, keys)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._authenticator: ClientAuthenticator | None = None
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.LINGER, 1000)  # last words reach clients, but not forever
        self._socket.setsockopt(zmq.BACKLOG, 128)
        if kind == zmq.ROUTER:
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.setsockopt(zmq.SNDHWM, PEER_HIGH_WATER_MARK)
            self._socket.setsockopt(zmq.RCVHWM, PEER_HIGH_WATER_MARK)
        if keys is not None:
            self._authenticator = ClientAuthenticator(self._context, keys.clients)
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
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def watch(self, source: int | _BoundSocket) -> None:
        """Let `wait` return when this descriptor or socket becomes readable, too."""
        watched = source._socket if isinstance(source, _BoundSocket) else source
        self._poller.register(watched, zmq.POLLIN)

    def wait(self, timeout_ms: int) -> set[int]:
        """Sleep until something watched is ready; returns the ready descriptors. -1: no limit.

        Raises:
            RuntimeError: no new client can come in any more.
        """
        if self._authenticator is not None:
            self._authenticator.check()
        return {ready for ready, _ in self._poller.poll(timeout_ms) if isinstance(ready, int)}

    def close(self) -> None:
        """Send what is queued, for at most a second, and close. Idempotent."""
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.close()
        self._context.term()


class EngineSocket(_BoundSocket):
    """An engine's ROUTER: for clients, or for replays. Belongs to one thread.

    keys: with them, only clients on the allow-list reach it; TCP endpoints need them.

    Raises:
        ConfigError: it cannot be bound. AddressInUseError: another process listens there.
    """

    def __init__(self, endpoint: str, keys: EngineKeys | None = None) -> None:
        super().__init__(zmq.ROUTER, endpoint, keys)
        self._cut = False  # the rest of a message with too many frames is still to be skipped

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """(routing id, frames) of the next message, or None when there is none now.

        Of a message with very many frames only the first are returned. Skipping the others can
        take several calls, which return None, so that no message holds its receiver up for long.
        """
        if self._cut and not self._skip():
            return None
        message = receive_frames(self._socket)
        if message is None:
            return None
        if len(message) == MAX_FRAMES:
            self._cut = bool(self._socket.getsockopt(zmq.RCVMORE))
        return message[0], message[1:]

    def _skip(self) -> bool:
        """Throw away frames up to the end of the message; False if that is not reached yet."""
        for _ in range(_MAX_SKIPPED_FRAMES):
            if not self._socket.recv(zmq.NOBLOCK, copy=False).more:
                self._cut = False
                return True
        return False

    def send(self, routing_id: bytes, frames: Sequence[bytes]) -> SendResult:
        """Queue a message for one client; never blocks."""
        try:
            send_frames(self._socket, [routing_id, *frames])
        except zmq.Again:
            return SendResult.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return SendResult.GONE
        return SendResult.SENT


class PublisherSocket(_BoundSocket):
    """The engine's PUB, ipc only. Belongs to one thread; `wait` also takes in subscriptions."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(zmq.PUB, endpoint)

    def publish(self, frames: Sequence[bytes]) -> None:
        """Queue a message for every subscriber; those at the high-water mark miss it."""
        send_frames(self._socket, frames)
