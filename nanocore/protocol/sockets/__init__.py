"""The sockets of the protocol, and the only package that imports zmq.

The engine binds, clients are DEALERs. On ipc the engine's side is ours (`ipc_router`): ZMTP over a
Unix socket, with a bound for all that a peer can make it keep. TCP needs CURVE keys, on both sides,
and is libzmq's ROUTER (`curve_router`), guarded from outside, with the options that reliability
needs: ROUTER_MANDATORY, so that a full or vanished peer is an answer instead of a silent loss;
finite high-water marks; a frame size limit; never ROUTER_HANDOVER, which would give one client's
replies to another. Two that suggest themselves are left alone: ZMTP heartbeats, because libzmq
4.3.5 aborts the process when one falls due on a broken connection whose reading is held up (libzmq
#4364; our PING does their work); and IMMEDIATE on clients, because it throws away what was received
and not yet read when the engine goes: its last words.
"""

from nanocore.protocol.sockets.client_socket import ClientSocket, ConnectionLostError
from nanocore.protocol.sockets.curve import ClientKeys, EngineKeys, client_keys
from nanocore.protocol.sockets.engine_socket import EngineSocket
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
    "client_keys",
]
