"""Options that all sockets share, and messages sent and received whole.

There is no TCP without CURVE, on either side: sockets without keys are refused here.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

import zmq

from nanocore.protocol.endpoint import TCP
from nanocore.protocol.errors import ConfigError
from nanocore.protocol.sockets.curve import ClientKeys, EngineKeys

MAX_FRAME_BYTES: Final = 16 * 2**20
MAX_FRAMES: Final = 8
"""Frames of one message that are kept, routing id included; no message of ours has as many."""
MAX_INPUT_BYTES: Final = 2**28
"""Limit of incomplete messages from all peers of an endpoint together."""
MAX_OUTPUT_BYTES: Final = 2**28
"""Limit of unsent messages for all peers of an endpoint together."""
MAX_CONNECTIONS: Final = 2048
MAX_OBSERVERS: Final = 256
"""Connections at an endpoint for KV cache events or their replays."""
PEER_HIGH_WATER_MARK: Final = 128
"""Messages that are kept for one peer. For one that does not read that is 8 MiB of the largest,
64 KiB each."""
BACKLOG: Final = 128  # connections that may wait to be accepted
HANDSHAKE_S: Final = 2.0
LINGER_S: Final = 1.0  # last words reach clients, but not forever
_HIGH_WATER_MARK: Final = 1000
_OPTIONS: Final[dict[int, int | bytes]] = {
    zmq.SNDHWM: _HIGH_WATER_MARK,
    zmq.RCVHWM: _HIGH_WATER_MARK,
    zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
    zmq.HANDSHAKE_IVL: int(HANDSHAKE_S * 1e3),
}
_TCP_OPTIONS: Final[dict[int, int | bytes]] = {
    # A peer whose machine is gone is let go after three seconds, even if nothing is sent. Not
    # TCP_MAXRT, for what is sent: it takes a peer that lets data wait for dead, too (`TcpGuard`).
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 1,
    zmq.TCP_KEEPALIVE_INTVL: 1,
    zmq.TCP_KEEPALIVE_CNT: 2,
}


# As integers: combining pyzmq's enums costs more than sending a small frame.
_LAST_FRAME: Final = int(zmq.NOBLOCK)
_MORE_FRAMES: Final = int(zmq.NOBLOCK | zmq.SNDMORE)


class SendResult(enum.Enum):
    SENT = "sent"
    FULL = "full"  # the client does not read: what waits for it is at the high-water mark
    GONE = "gone"  # no such peer any more


def socket_options(endpoint: str, keys: EngineKeys | ClientKeys | None) -> dict[int, int | bytes]:
    """Return the options of a socket at an endpoint, to be set before it binds or connects.

    Raises:
        ConfigError: TCP without keys.
    """
    options = dict(_OPTIONS)
    if endpoint.startswith(TCP):
        if keys is None:
            raise ConfigError(
                f"endpoint {endpoint!r} needs CURVE keys, because anybody who reaches it could use "
                "it: give a curve_dir that `nanocore-keygen` made, or use an ipc:// endpoint"
            )
        options |= _TCP_OPTIONS
        options[zmq.IPV6] = int("[" in endpoint)  # else host names would mean IPv6 first
    if keys is not None:
        options |= keys.options
    return options


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
    """Send one message whole, or raise zmq.Again: only the first frame can find no room."""
    *first, last = frames
    for frame in first:
        socket.send(frame, _MORE_FRAMES)
    socket.send(last, _LAST_FRAME)


def receive_frames(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """Return the frames of the next message, or None when there is none now.

    A message of more than MAX_FRAMES is cut there; its rest is the next message.
    """
    try:
        frame = socket.recv(_LAST_FRAME, copy=False)
    except zmq.Again:
        return None
    frames = [frame.bytes]
    while frame.more and len(frames) < MAX_FRAMES:  # a message arrives whole
        frame = socket.recv(_LAST_FRAME, copy=False)
        frames.append(frame.bytes)
    return frames
