"""ZMTP 3.1 with the NULL mechanism, binding side: bytes to messages and back. No I/O.

`ZmtpReader` takes what one peer sent, in pieces of any size, and returns its messages one by one.
Memory is taken for bytes that have arrived, never for an announced length; a message is bounded as
a whole, whatever its frames; frames that no message of ours can have are dropped as they come; and
a call handles a bounded number of frames. A peer that breaks the rules causes a ProtocolError, and
must be disconnected. Specification: https://rfc.zeromq.org/spec/37/
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from nanocore.protocol.errors import ProtocolError
from nanocore.protocol.sockets.options import MAX_FRAME_BYTES, MAX_FRAMES

MAX_MESSAGE_BYTES: Final = MAX_FRAME_BYTES + 2**20
"""Limit of all frames of a message together, including dropped ones."""
_FRAME_COST_BYTES: Final = 128
"""Extra cost of a frame in addition to its bytes, because handling it takes time."""
MAX_COMMAND_BYTES: Final = 4096
_MAX_FRAMES_PER_CALL: Final = 1000  # about a millisecond
_COPY_BYTES: Final = 2**14  # what is shorter is joined, which costs less than a longer list

Buffer = bytes | memoryview
_MORE, _LONG, _COMMAND = 1, 2, 4
_WHOLE: Final = -1
_GREETING_BYTES: Final = 64
_SIGNATURE: Final = b"\xff\0\0\0\0\0\0\0\1\x7f"
_READY, _PING, _PONG, _ERROR = b"\5READY", b"\4PING", b"\4PONG", b"\5ERROR"
_MAX_PING_CONTEXT_BYTES: Final = 16


def command_frame(body: bytes) -> bytes:
    """Frame of a command of up to 255 bytes."""
    return bytes((_COMMAND, len(body))) + body


class Role:
    """Socket type and version of the binding side. minor: of the ZMTP version."""

    def __init__(self, socket_type: bytes, peer_types: Sequence[bytes], minor: int) -> None:
        self.peer_types = peer_types
        version = bytes((3, minor))
        self.greeting = _SIGNATURE + version + b"NULL".ljust(20, b"\0") + bytes(32)
        value = len(socket_type).to_bytes(4, "big") + socket_type
        identity = b"\x08Identity\0\0\0\0" if socket_type == b"ROUTER" else b""
        self.ready = command_frame(_READY + b"\x0bSocket-Type" + value + identity)


ROUTER: Final = Role(b"ROUTER", (b"DEALER", b"REQ", b"ROUTER"), minor=1)
PUB: Final = Role(b"PUB", (b"SUB", b"XSUB"), minor=0)  # to which subscriptions are messages


def pack_message(frames: Sequence[bytes]) -> list[Buffer]:
    """Encode a message as buffers; long frames are not copied."""
    buffers: list[Buffer] = []
    short = b""
    last = len(frames) - 1
    for number, frame in enumerate(frames):
        flags = _MORE if number < last else 0
        size = len(frame)
        if size < 256:
            short += bytes((flags, size)) + frame
            continue
        short += bytes((flags | _LONG,)) + size.to_bytes(8, "big")
        if size <= _COPY_BYTES:
            short += frame
        else:
            buffers += (short, frame)
            short = b""
    if short:
        buffers.append(short)
    return buffers


class ZmtpReader:
    """Decodes what one peer sends.

    is_ready: the handshake is over. is_drained: `next_message` has nothing to look at until it is
    fed. answers: commands that are to be sent to the peer; whoever sends them clears the list.
    num_bytes: held for a message that is not complete.
    """

    __slots__ = (
        "_at", "_data", "_flags", "_frames", "_greeted", "_message_bytes", "_missing", "_partial",
        "_role", "answers", "is_drained", "is_ready",
    )  # fmt: skip

    def __init__(self, role: Role = ROUTER) -> None:
        self._role = role
        self.is_ready = False
        self.is_drained = True
        self.answers: list[bytes] = []
        self._greeted = False
        self._data = b""  # fed, and looked at up to `_at`
        self._at = 0
        self._frames: list[bytes] = []  # of the message that is coming
        self._message_bytes = 0
        self._flags = 0  # of the last frame
        self._missing = _WHOLE  # bytes of it that have not come
        self._partial = bytearray()  # what has come of it

    @property
    def num_bytes(self) -> int:
        return len(self._data) + len(self._partial) + sum(map(len, self._frames))

    def feed(self, data: memoryview) -> None:
        """Add received bytes, once all earlier ones have been looked at (`is_drained`)."""
        if self._missing > 0:
            taken = data[: self._missing]
            if self._is_kept():
                self._partial += taken
            self._missing -= len(taken)
            self._data = bytes(data[len(taken) :])
        else:
            self._data += data
        self.is_drained = False

    def next_message(self) -> list[bytes] | None:
        """Return the frames of the next message, at most MAX_FRAMES - 1, or None.

        None, too, when the handshake is just over, and when a bounded effort found no message.

        Raises:
            ProtocolError: the peer does not keep to ZMTP 3, or its message is too long.
        """
        for _ in range(_MAX_FRAMES_PER_CALL):
            frame = self._next_frame() if self._greeted or self._greet() else None
            if frame is None:
                self._drain()
                return None
            flags = self._flags
            if flags & _COMMAND:
                if self._obey(frame):
                    break
                continue
            frames = self._frames
            if len(frames) < MAX_FRAMES - 1:
                frames.append(frame)
            if not flags & _MORE:
                self._frames, self._message_bytes = [], 0
                if self._at == len(self._data):
                    self._drain()
                return frames
        if self._at == len(self._data):
            self._drain()
        return None

    def _drain(self) -> None:
        """Mark the data as looked at; keep only an incomplete rest."""
        self.is_drained = True
        self._data, self._at = self._data[self._at :], 0

    def _is_kept(self) -> bool:
        """Whether the next frame is within MAX_FRAMES."""
        return len(self._frames) < MAX_FRAMES - 1 or bool(self._flags & _COMMAND)

    def _greet(self) -> bool:
        """Check the peer's greeting; return whether it is complete."""
        data = self._data
        if data[:1] not in (b"", b"\xff") or data[9:10] not in (b"", b"\x7f"):
            raise ProtocolError("not a ZMTP greeting")
        if data[10:11] and data[10] < 3:
            raise ProtocolError("ZMTP before 3.0")
        if len(data) < _GREETING_BYTES:
            return False
        if data[12:32].rstrip(b"\0") != b"NULL":
            raise ProtocolError("a ZMTP mechanism other than NULL")
        self._at = _GREETING_BYTES
        self._greeted = True
        return True

    def _next_frame(self) -> bytes | None:
        """Return the next frame, with its flags in `_flags`; b"" if it is dropped."""
        if self._missing != _WHOLE:
            if self._missing:
                return None
            self._missing = _WHOLE
            frame, self._partial = bytes(self._partial), bytearray()
            return frame
        data, at = self._data, self._at
        num_left = len(data) - at
        if num_left < 2:
            return None
        flags = data[at]
        if flags & _LONG:
            if num_left < 9:
                return None
            header, size = 9, int.from_bytes(data[at + 1 : at + 9], "big")
        else:
            header, size = 2, data[at + 1]
        self._check(flags, size)
        self._flags = flags
        start = at + header
        end = start + size
        if num_left >= header + size:
            self._at = end
            return data[start:end] if self._is_kept() else b""
        self._missing = end - len(data)
        if self._is_kept():
            self._partial += memoryview(data)[start:]
        self._data, self._at = b"", 0
        return None

    def _check(self, flags: int, num_bytes: int) -> None:
        if flags & _COMMAND:
            if flags & ~(_COMMAND | _LONG) or num_bytes > MAX_COMMAND_BYTES:
                raise ProtocolError("a ZMTP command with wrong flags, or too long")
            return
        if flags & ~(_MORE | _LONG) or not self.is_ready:
            raise ProtocolError("a ZMTP frame with wrong flags, or before READY")
        self._message_bytes += num_bytes + _FRAME_COST_BYTES
        if num_bytes > MAX_FRAME_BYTES or self._message_bytes > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"a message of more than {MAX_MESSAGE_BYTES} bytes, or a frame of it of more than "
                f"{MAX_FRAME_BYTES}"
            )

    def _obey(self, command: bytes) -> bool:
        """Handle a command and ignore unknown ones; return True for READY."""
        if not self.is_ready:
            if not command.startswith(_READY):
                raise ProtocolError("a ZMTP handshake without READY")
            socket_type = _properties(command[len(_READY) :]).get(b"socket-type", b"")
            if socket_type not in self._role.peer_types:
                raise ProtocolError(f"a peer that is not one of {self._role.peer_types}")
            # An Identity is not heeded: nobody can choose the name of a connection.
            self.is_ready = True
            self.answers.append(self._role.ready)
            return True
        if command.startswith(_PING):  # then a time to live, 2 bytes, and a context
            context = command[len(_PING) + 2 :][:_MAX_PING_CONTEXT_BYTES]
            if len(self.answers) < 2:  # else one that is not sent yet is as good
                self.answers.append(command_frame(_PONG + context))
        elif command.startswith(_ERROR):
            raise ProtocolError("the peer reports an error")
        return False


def _properties(data: bytes) -> dict[bytes, bytes]:
    """Properties of a READY command; names in lower case."""
    found = {}
    while data:
        name_end = 1 + data[0]
        value_start = name_end + 4
        size = int.from_bytes(data[name_end:value_start], "big")
        if len(data) < value_start + size:
            raise ProtocolError("READY is cut short")
        found[data[1:name_end].lower()] = data[value_start : value_start + size]
        data = data[value_start + size :]
    return found
