"""What all sockets share: their options, and messages sent and received whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import zmq

MAX_FRAME_BYTES: Final = 16 * 2**20
MAX_FRAMES: Final = 8
"""Frames of one message that are kept, routing id included; no message of ours has as many."""
_HIGH_WATER_MARK: Final = 1000
OPTIONS: Final = {
    zmq.SNDHWM: _HIGH_WATER_MARK,
    zmq.RCVHWM: _HIGH_WATER_MARK,
    zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
    zmq.HANDSHAKE_IVL: 2000,
}


# As integers: combining pyzmq's enums costs more than sending a small frame.
_LAST_FRAME: Final = int(zmq.NOBLOCK)
_MORE_FRAMES: Final = int(zmq.NOBLOCK | zmq.SNDMORE)


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
    """Send one message whole, or raise zmq.Again: only the first frame can find no room."""
    *first, last = frames
    for frame in first:
        socket.send(frame, _MORE_FRAMES)
    socket.send(last, _LAST_FRAME)


def receive_frames(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """The frames of the next message, or None when there is none now.

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
