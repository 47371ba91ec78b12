"""The bytes of a GGUF file's header, taken one after the other: bounded, whatever the file says.

Nothing is believed before it is compared with what the file has left, and nothing is allocated for
what is not there. Every error names the file and the byte.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO, Final

from nanocore.protocol.errors import ModelFileError

MAX_HEADER_BYTES: Final = 128 * 2**20
"""Ten times the largest: a vocabulary of 256,000 tokens takes 12 MB."""
MAX_ITEMS: Final = 2**22
"""Of all arrays of a file together: as Python's objects they take some 60 bytes each."""
_MAX_STRING_BYTES: Final = 2**20
_CHUNK_BYTES: Final = 2**20
_U64: Final = struct.Struct("<Q")


class HeaderBytes:
    """What has not been taken yet.

    offset: of the next byte in the file. num_bytes: of the whole file.
    """

    def __init__(self, path: Path, file: BinaryIO, num_bytes: int) -> None:
        self._path, self._file = path, file
        self.num_bytes = num_bytes
        self._buffer, self._position, self._start = b"", 0, 0
        self._num_items = 0

    @property
    def offset(self) -> int:
        return self._start + self._position

    def error(self, why: str) -> ModelFileError:
        """The error at this place."""
        return ModelFileError(f"{self._path}: at byte {self.offset} {why}")

    def take(self, count: int, what: str) -> bytes:
        """The next bytes. what: names them in the error that the file has not so many."""
        start = self._have(count, what)
        self._position = start + count
        return self._buffer[start : self._position]

    def number(self, layout: struct.Struct, what: str) -> int:
        """The next number."""
        start = self._have(layout.size, what)  # first: it may replace the buffer
        value: int = layout.unpack_from(self._buffer, start)[0]
        self._position += layout.size
        return value

    def string(self, what: str) -> str:
        """The next text: its length in bytes, and these."""
        count = self.number(_U64, f"the length of {what}")
        if count > _MAX_STRING_BYTES:
            raise self.error(f"{what} has {count} bytes: at most {_MAX_STRING_BYTES} are read")
        try:
            return self.take(count, what).decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is no UTF-8 ({error.reason})") from None

    def strings(self, count: int, what: str, keep: bool) -> list[str]:
        """As many texts; none, but passed over, where they are not kept."""
        self.count_items(count, _U64.size, what)
        if keep:
            return [self.string(what) for _ in range(count)]
        for _ in range(count):
            length = self.number(_U64, what)
            self.require(length, 1, what)
            self._position = self._have(length, what) + length
        return []

    def count_items(self, count: int, item_bytes: int, what: str) -> None:
        """Refuse an array that the file cannot hold, or that is one too many."""
        self.require(count, item_bytes, what)
        self._num_items += count
        if self._num_items > MAX_ITEMS:
            raise self.error(f"{what} has {count} items: at most {MAX_ITEMS} are read of a file")

    def require(self, count: int, item_bytes: int, what: str) -> None:
        """Refuse a count of items that the file cannot hold."""
        if count * item_bytes > self.num_bytes - self.offset:
            raise self.error(
                f"there are to be {count} of {what}, and the file ends before, with "
                f"{self.num_bytes} bytes: its download was not completed, or it is damaged; "
                "download it again"
            )

    def _have(self, count: int, what: str) -> int:
        """Where in the buffer the next `count` bytes begin, once they are there."""
        if self._position + count > len(self._buffer):
            self.require(count, 1, f"the bytes of {what}")
            if self.offset + count > MAX_HEADER_BYTES:
                raise self.error(f"a header goes on, and at most {MAX_HEADER_BYTES} bytes are read")
            rest = self._buffer[self._position :]
            wanted = max(_CHUNK_BYTES, count) - len(rest)
            self._start, self._position = self.offset, 0
            self._buffer = rest + self._file.read(wanted)
            if len(self._buffer) < count:
                raise self.error("the file became shorter while it was read")
        return self._position
