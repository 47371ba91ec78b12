"""One end of the duplex pipe between an engine and a rank: typed messages, framed by their length.

A Unix stream socket, so that the death of either side closes it for the other.
"""

from __future__ import annotations

import select
import socket
import struct
from typing import Any, Final, Generic, TypeVar

import msgspec

T = TypeVar("T")
_LENGTH: Final = struct.Struct("<I")


def encode_frame(message: msgspec.Struct) -> bytes:
    """The bytes of a message on the pipe."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class Pipe(Generic[T]):
    """Sends frames, receives messages of type T.

    Args:
        end: this side's socket. message_type: what comes, as msgspec decodes it.
    """

    def __init__(self, end: socket.socket, message_type: Any) -> None:
        self._end = end
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(message_type)

    def fileno(self) -> int:
        """The socket's descriptor; readable when a message, or the end, is there."""
        return self._end.fileno()

    def send(self, message: msgspec.Struct) -> None:
        """Send one message. Raises OSError if nobody holds the other end."""
        self._end.sendall(encode_frame(message))

    def send_frame(self, frame: bytes) -> None:
        """Send what `encode_frame` made, to several peers perhaps."""
        self._end.sendall(frame)

    def has_message(self, timeout_s: float) -> bool:
        """Whether `recv` has something to read, or the end to report, within this time."""
        return bool(select.select([self._end], [], [], timeout_s)[0])

    def recv(self) -> T:
        """Wait for a message.

        Raises:
            EOFError: the other side is gone.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._decoder.decode(self._read(length))

    def close(self) -> None:
        """Close this end; the peer sees the end of file."""
        self._end.close()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                count = self._end.recv_into(view)
            except ConnectionResetError:
                count = 0
            if count == 0:
                raise EOFError("the pipe's other end is closed")
            view = view[count:]
        return data
