"""One end of the duplex pipe between an engine and a rank: typed messages, framed by their length.

A Unix stream socket, so that the death of either side closes it for the other.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

import msgspec

T = TypeVar("T")
R = TypeVar("R")
_LENGTH: Final = struct.Struct("<I")
_CHUNK_BYTES: Final = 1 << 20


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
        self._taken_in = bytearray()

    def fileno(self) -> int:
        """The socket's descriptor; readable when a message, or the end, is there."""
        return self._end.fileno()

    def send(self, message: msgspec.Struct) -> None:
        """Send one message. Raises OSError if nobody holds the other end."""
        self._end.sendall(encode_frame(message))

    def send_some(self, frame: memoryview) -> memoryview:
        """Send as much of `encode_frame`'s bytes as there is room for now; returns the rest.

        Raises OSError if nobody holds the other end.
        """
        with suppress(BlockingIOError):
            frame = frame[self._end.send(frame, socket.MSG_DONTWAIT) :]
        return frame

    def take_in(self) -> None:
        """Make room for the other side to send: what has come is kept for `recv`.

        Raises EOFError: the other side is gone.
        """
        with suppress(BlockingIOError):
            self._taken_in += self._received(self._end.recv, _CHUNK_BYTES, socket.MSG_DONTWAIT)

    @property
    def has_taken_in(self) -> bool:
        """Whether `recv` has something that is no longer in the socket."""
        return bool(self._taken_in)

    def has_message(self, timeout_s: float) -> bool:
        """Whether `recv` has something to read, or the end to report, within this time."""
        poll = select.poll()  # select cannot wait for descriptors above 1023
        poll.register(self._end, select.POLLIN)
        return self.has_taken_in or bool(poll.poll(timeout_s * 1000))

    def recv(self) -> T:
        """Wait for a message. Raises EOFError: the other side is gone."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._decoder.decode(self._read(length))

    def close(self) -> None:
        self._end.close()

    def _read(self, size: int) -> bytearray:
        data, self._taken_in = self._taken_in[:size], self._taken_in[size:]
        num_taken = len(data)
        data += bytes(size - num_taken)
        view = memoryview(data)[num_taken:]
        while view:
            view = view[self._received(self._end.recv_into, view) :]
        return data

    @staticmethod
    def _received(receive: Callable[..., R], *arguments: Any) -> R:
        try:
            received = receive(*arguments)
        except ConnectionResetError:
            received = None
        if not received:
            raise EOFError("the pipe's other end is closed")
        return received
