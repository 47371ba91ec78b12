"""The socket that an engine binds for its clients: ours for ipc, libzmq's for what needs keys."""

from __future__ import annotations

from collections.abc import Sequence

from nanocore.protocol.endpoint import IPC, ipc_address
from nanocore.protocol.sockets.curve import EngineKeys
from nanocore.protocol.sockets.curve_router import CurveRouter
from nanocore.protocol.sockets.ipc_router import IpcRouter
from nanocore.protocol.sockets.options import SendResult


class EngineSocket:
    """An engine's ROUTER. Belongs to one thread.

    A connection is a guest until it is admitted and after it is dismissed. Guests may be hung up
    on: after a while, and the longest-standing one when a place is needed.

    keys: with them, only clients on the allow-list reach it; TCP endpoints need them.

    Raises:
        ConfigError: it cannot be bound. AddressInUseError: another process listens there.
    """

    def __init__(self, endpoint: str, keys: EngineKeys | None = None) -> None:
        self.router: IpcRouter | CurveRouter
        if endpoint.startswith(IPC) and keys is None:
            self.router = IpcRouter(ipc_address(endpoint).path)
        else:
            self.router = CurveRouter(endpoint, keys)

    def limit(self, max_connections: int, guest_timeout_s: float) -> None:
        """Let so many connect at once, and guests stay for so long; as made, that is for ever."""
        self.router.limit(max_connections, guest_timeout_s)

    def watch(self, fd: int) -> None:
        """Let `wait` return when this descriptor becomes readable, too."""
        self.router.watch(fd)

    def wait(self, timeout_ms: int) -> set[int]:
        """Sleep until something is ready; returns the ready watched descriptors. -1: no limit.

        Raises:
            RuntimeError: no new client can come in any more.
        """
        return self.router.wait(timeout_ms)

    @property
    def is_busy(self) -> bool:
        """Whether something has arrived that `receive` has not looked at."""
        return self.router.is_busy

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """(routing id, frames) of the next message, or None when there is none now.

        Of a message with very many frames only the first are returned. A call never takes long: it
        may return None and leave something to look at (`is_busy`).
        """
        return self.router.receive()

    def send(self, routing_id: bytes, frames: Sequence[bytes]) -> SendResult:
        """Queue a message for one client; never blocks."""
        return self.router.send(routing_id, frames)

    def is_admin(self, routing_id: bytes) -> bool:
        """Whether the peer may do what concerns all clients: on ipc, or by its key's file."""
        return self.router.is_admin(routing_id)

    def admit(self, routing_id: bytes) -> None:
        """Keep the connection: it is no guest any more."""
        self.router.admit(routing_id)

    def dismiss(self, routing_id: bytes) -> None:
        """Make the connection a guest again, as of now."""
        self.router.dismiss(routing_id)

    def take_gone(self) -> list[bytes]:
        """The admitted that have disconnected since the last call."""
        return self.router.take_gone()

    def close(self) -> None:
        """Send what is queued, for at most a second, and close. Idempotent."""
        self.router.close()
