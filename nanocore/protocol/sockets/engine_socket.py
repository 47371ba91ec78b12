"""The socket that an engine binds for its clients: `IpcRouter` on ipc, `CurveRouter` on TCP."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from nanocore.protocol.endpoint import IPC, ipc_address
from nanocore.protocol.sockets.ipc_router import IpcRouter

if TYPE_CHECKING:
    from nanocore.protocol.sockets.curve import EngineKeys
    from nanocore.protocol.sockets.curve_router import CurveRouter

EngineSocket: TypeAlias = "IpcRouter | CurveRouter"
"""An engine's ROUTER, whose methods `IpcRouter` describes. Belongs to one thread.

A peer has a session from `admit` to `dismiss`. Connections without one may be closed: after a
timeout, and the oldest one when a new connection needs its place.
"""


def bind_engine_socket(endpoint: str, keys: EngineKeys | None = None) -> EngineSocket:
    """Bind the socket of an endpoint. On TCP, only clients on the keys' allow-list reach it.

    Raises:
        ConfigError: it cannot be bound, or is TCP without keys.
        AddressInUseError: another process listens there.
    """
    if endpoint.startswith(IPC):
        return IpcRouter(ipc_address(endpoint).path)
    from nanocore.protocol.sockets.curve_router import CurveRouter  # imports zmq

    return CurveRouter(endpoint, keys)
