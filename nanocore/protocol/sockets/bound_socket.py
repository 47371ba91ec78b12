"""Sockets of libzmq that an engine binds, and the poller in which their thread sleeps."""

from __future__ import annotations

import os

import zmq

from nanocore.protocol.errors import AddressInUseError, ConfigError
from nanocore.protocol.sockets.client_authenticator import ClientAuthenticator
from nanocore.protocol.sockets.curve import EngineKeys
from nanocore.protocol.sockets.options import (
    BACKLOG,
    LINGER_S,
    PEER_HIGH_WATER_MARK,
    socket_options,
)


class BoundSocket:
    """A socket for an endpoint, in a context of its own, and a poller to sleep in."""

    def __init__(self, kind: int, endpoint: str, keys: EngineKeys | None = None) -> None:
        options = socket_options(endpoint, keys)
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._authenticator: ClientAuthenticator | None = None
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.LINGER, int(LINGER_S * 1e3))
        self._socket.setsockopt(zmq.BACKLOG, BACKLOG)
        if kind == zmq.ROUTER:
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.setsockopt(zmq.SNDHWM, PEER_HIGH_WATER_MARK)
            self._socket.setsockopt(zmq.RCVHWM, PEER_HIGH_WATER_MARK)
        if keys is not None:
            self._authenticator = ClientAuthenticator(self._context, keys.clients)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def _bind(self, endpoint: str) -> None:
        """Listen.

        Raises:
            ConfigError: it cannot be bound. AddressInUseError: another process listens there.
        """
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

    def watch(self, fd: int) -> None:
        """Let `wait` return when this descriptor becomes readable, too."""
        self._poller.register(fd, zmq.POLLIN)

    def wait(self, timeout_ms: int) -> set[int]:
        """Sleep until something watched is ready; returns the ready descriptors. -1: no limit.

        Raises:
            RuntimeError: no new client can come in any more.
        """
        return {ready for ready in self._poll(timeout_ms) if isinstance(ready, int)}

    def _poll(self, timeout_ms: int) -> list[object]:
        """What became ready, the socket included."""
        if self._authenticator is not None:
            self._authenticator.check()
        return [ready for ready, _ in self._poller.poll(timeout_ms)]

    def close(self) -> None:
        """Send what is queued, for at most a second, and close. Idempotent."""
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.close()
        self._context.term()
