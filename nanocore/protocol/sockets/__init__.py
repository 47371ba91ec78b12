"""The sockets of the protocol, and the only package that imports zmq: an engine on ipc does not.

The engine binds, clients are DEALERs. On ipc the engine's side is `IpcRouter`: ZMTP over a Unix
socket, with a bound for everything a peer can make it keep. TCP needs CURVE keys on both sides and
uses libzmq's ROUTER (`CurveRouter`) with ROUTER_MANDATORY (a full or vanished peer is an error, not
a silent loss), finite high-water marks and a frame size limit. Three options are off on purpose:
- ROUTER_HANDOVER would give one client's replies to another.
- ZMTP heartbeats: libzmq 4.3.5 aborts the process when one falls due on a broken connection whose
  reading is held up (libzmq #4364). Our PING replaces them.
- IMMEDIATE on clients drops received, unread messages when the engine goes: its last words.
"""
