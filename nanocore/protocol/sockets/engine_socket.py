"""The socket that an engine binds for its clients: `IpcRouter` on ipc, `CurveRouter` on TCP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from nanocore.protocol.endpoint import IPC, ipc_address
from nanocore.protocol.sockets.ipc_router import IpcRouter
from nanocore.protocol.sockets.options import SendResult

if TYPE_CHECKING:
    from nanocore.protocol.sockets.curve import EngineKeys
    from nanocore.protocol.sockets.curve_router import CurveRouter


class EngineSocket(Protocol):
    """An engine's ROUTER. Belongs to one thread.

    A peer has a session from `admit` to `dismiss`. Connections without one may be closed: after a
    timeout, and the oldest one when a new connection needs its place.
    """

    def limit(self, max_connections: int, unadmitted_timeout_s: float) -> None:
        """Set the number of connections, and the time that one without a session may stay."""
        ...

    def watch(self, fd: int) -> None:
        """Let `wait` return when this descriptor becomes readable, too."""
        ...

    def wait(self, timeout_ms: int) -> set[int]:
        """Sleep until something is ready; return the ready watched descriptors. -1: no limit.

        Raises:
            RuntimeError: the thread that authenticates clients has died.
        """
        ...

    @property
    def is_busy(self) -> bool:
        """Whether something has arrived that `receive` has not looked at."""
        ...

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        """Return (routing id, frames) of the next message, or None when there is none now.

        Frames beyond the limit are dropped. A call never takes long: it may return None while
        `is_busy`.
        """
        ...

    def send(self, routing_id: bytes, frames: Sequence[bytes]) -> SendResult:
        """Queue a message for one client; never blocks."""
        ...

    def is_admin(self, routing_id: bytes) -> bool:
        """Whether the peer has the role admin: every peer on ipc; with keys, those in admins/."""
        ...

    def admit(self, routing_id: bytes) -> None: ...

    def dismiss(self, routing_id: bytes) -> None: ...

    def take_gone(self) -> list[bytes]:
        """Return the admitted peers that have disconnected since the last call."""
        ...

    def close(self) -> None:
        """Send what is queued, for at most a second, and close. Idempotent."""
        ...


def bind_engine_socket(endpoint: str, keys: EngineKeys | None = None) -> IpcRouter | CurveRouter:
    """Bind the socket of an endpoint. On TCP, only clients on the keys' allow-list reach it.

    Raises:
        ConfigError: it cannot be bound, or is TCP without keys.
        AddressInUseError: another process listens there.
    """
    if endpoint.startswith(IPC):
        return IpcRouter(ipc_address(endpoint).path)
    from nanocore.protocol.sockets.curve_router import CurveRouter  # imports zmq

    return CurveRouter(endpoint, keys)
