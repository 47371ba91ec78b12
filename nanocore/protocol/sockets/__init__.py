"""The sockets of the protocol, and the only package that imports zmq.

The engine binds, clients are DEALERs. On ipc the engine's side is `IpcRouter`: ZMTP over a Unix
socket, with a bound for everything a peer can make it keep. TCP needs CURVE keys on both sides and
uses libzmq's ROUTER (`CurveRouter`) with ROUTER_MANDATORY (a full or vanished peer is an error, not
a silent loss), finite high-water marks and a frame size limit. Three options are off on purpose:
- ROUTER_HANDOVER would give one client's replies to another.
- ZMTP heartbeats: libzmq 4.3.5 aborts the process when one falls due on a broken connection whose
  reading is held up (libzmq #4364). Our PING replaces them.
- IMMEDIATE on clients drops received, unread messages when the engine goes: its last words.
"""

from nanocore.protocol.sockets.client_socket import ClientSocket, ConnectionLostError
from nanocore.protocol.sockets.curve import ClientKeys, EngineKeys, client_keys
from nanocore.protocol.sockets.engine_socket import EngineSocket, bind_engine_socket
from nanocore.protocol.sockets.ipc_router import IpcRouter
from nanocore.protocol.sockets.options import MAX_FRAME_BYTES, MAX_OBSERVERS, SendResult
from nanocore.protocol.sockets.publisher_socket import PublisherSocket

__all__ = [
    "MAX_FRAME_BYTES",
    "MAX_OBSERVERS",
    "ClientKeys",
    "ClientSocket",
    "ConnectionLostError",
    "EngineKeys",
    "EngineSocket",
    "IpcRouter",
    "PublisherSocket",
    "SendResult",
    "bind_engine_socket",
    "client_keys",
]
