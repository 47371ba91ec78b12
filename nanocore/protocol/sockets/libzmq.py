"""Options of libzmq's sockets, and messages sent and received whole.

There is no TCP without CURVE, on either side: sockets without keys are refused here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import zmq

from nanocore.protocol.endpoint import TCP
from nanocore.protocol.errors import ConfigError
from nanocore.protocol.sockets.curve import ClientKeys, EngineKeys
from nanocore.protocol.sockets.options import HANDSHAKE_S, MAX_FRAME_BYTES, MAX_FRAMES

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
