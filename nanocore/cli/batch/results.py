"""Results: a file with one line per result, in OpenAI's form; a later run continues it.

The file is locked by one run at a time. An unfinished last line is dropped. A file with anything
but results is refused before it is changed.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
import uuid
from collections.abc import Iterator
from typing import Final

import msgspec

from nanocore.cli.batch.calls import CallResponse
from nanocore.cli.batch.pending import DUPLICATE_CODE, BadLine, BatchRequest, ResultIndex
from nanocore.protocol.errors import ConfigError, NanocoreError

STANDARD: Final = "-"
START: Final = b'{"id":"batch_req_'
"""The beginning of each line."""


class ResultError(msgspec.Struct, frozen=True):
    """code: for programs. line: of the input, from 1."""

    code: str | None
    message: str
    line: int


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _ResultLine(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Response | None
    error: ResultError | None


class ResultHead(msgspec.Struct, frozen=True):
    """The fields of a result that a later run needs."""

    id: str
    custom_id: str | None
    error: ResultError | None

    @property
    def is_of_line(self) -> bool:
        """Whether the result is of a line number instead of a custom_id."""
        return self.custom_id is None or (
            self.error is not None and self.error.code == DUPLICATE_CODE
        )


class _ErrorOfBody(msgspec.Struct, frozen=True):
    message: str = "the request failed"
    code: str | int | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorOfBody = _ErrorOfBody()


def response_line(
    request: BatchRequest, response: CallResponse
) -> tuple[bytes, ResultError | None]:
    """Return the result's line, and its error."""
    error = None
    if response.status >= 400:
        try:
            found = msgspec.json.decode(response.body, type=_ErrorBody).error
        except msgspec.ValidationError:  # another server's form
            found = _ErrorOfBody()
        code = None if found.code is None else str(found.code)
        error = ResultError(code, found.message, request.line)
    # JSON strings contain no line breaks, so this only changes white space.
    body = msgspec.Raw(response.body.replace(b"\n", b" "))
    sent = _Response(response.status, response.request_id, body)
    return _encode(_ResultLine(_new_id(), request.custom_id, sent, error)), error


def bad_line(bad: BadLine) -> tuple[bytes, ResultError]:
    """Return the result's line of an invalid line, and its error."""
    error = ResultError(bad.code, f"line {bad.line}: {bad.message}", bad.line)
    return _encode(_ResultLine(_new_id(), bad.custom_id, None, error)), error


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


def _encode(line: _ResultLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"


_DECODER: Final = msgspec.json.Decoder(ResultHead)


class Results:
    """The open file; its earlier results are added to the index.

    path: "-" is standard output, which like a pipe has no earlier results.

    Raises:
        ConfigError: the file cannot be written, is in use by another run, or has other data.
    """

    def __init__(self, path: str, index: ResultIndex) -> None:
        self._path = path
        self._fd = _open(path)
        try:
            if stat.S_ISREG(os.fstat(self._fd).st_mode) and path != STANDARD:
                _lock(path, self._fd)
                os.ftruncate(self._fd, _read(path, self._fd, index))
                os.lseek(self._fd, 0, os.SEEK_END)
        except BaseException:
            os.close(self._fd)
            raise

    def is_file(self, other: int) -> bool:
        """Whether a descriptor refers to this file."""
        return os.path.samestat(os.fstat(self._fd), os.fstat(other))

    def append(self, line: bytes) -> None:
        """Write a whole line without buffering; raises NanocoreError if that fails."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            raise NanocoreError(f"{self._path}: cannot write a result: {error.strerror}") from None

    def close(self) -> None:
        os.close(self._fd)


def _open(path: str) -> int:
    if path == STANDARD:
        return os.dup(sys.stdout.fileno())
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: the results cannot be written") from None


def _lock(path: str, fd: int) -> None:
    """Raise ConfigError if another run has locked the file."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{path}: another run is writing its results there") from None


def _read(path: str, fd: int, index: ResultIndex) -> int:
    """Index existing results; return their length without an unfinished last line."""
    num_bytes = 0
    for number, line, head in _whole_lines(path, fd):
        num_bytes += len(line)
        if head.is_of_line:
            if head.error is None:
                raise _other_file(path, number)
            index.bad_lines.add(head.error.line)
            continue
        custom_id = head.custom_id or ""
        if custom_id in index.failed:
            raise ConfigError(
                f"{path}: line {number} is a second result of {custom_id!r}: choose "
                "another output file"
            )
        index.failed[custom_id] = head.error is not None
    return num_bytes


def _whole_lines(path: str, fd: int) -> Iterator[tuple[int, bytes, ResultHead]]:
    """Yield (number, line, decoded line), without an unfinished last line.

    Raises:
        ConfigError: the file holds other data.
    """
    os.lseek(fd, 0, os.SEEK_SET)
    with open(fd, "rb", closefd=False) as file:
        for number, line in enumerate(file, 1):
            if line[: len(START)] != START[: len(line)]:
                raise _other_file(path, number)
            if not line.endswith(b"\n"):
                return
            try:
                yield number, line, _DECODER.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                raise _other_file(path, number) from None


def _other_file(path: str, number: int) -> ConfigError:
    return ConfigError(
        f"{path}: line {number} is not a batch result; the file is unchanged: choose another "
        "output file"
    )
