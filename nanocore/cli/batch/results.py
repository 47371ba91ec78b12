"""A batch's results: a file that grows by a line for each one, and is where a later run goes on.

One run at a time writes it: it is locked. A last line that was cut in the middle is dropped. A file
that holds anything else than results is refused before it is touched.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import msgspec

from nanocore.cli.batch.ledger import Ledger
from nanocore.cli.batch.result_lines import START, ResultHead
from nanocore.protocol.errors import ConfigError, NanocoreError

STANDARD: Final = "-"
_DECODER: Final = msgspec.json.Decoder(ResultHead)


class Results:
    """Opened, with what it has noted in the ledger; `close` it.

    path: "-" is standard output, which like a pipe has no results of earlier runs. without_errors:
    results that are errors are taken out of the file first, as if those lines had none.

    Raises:
        ConfigError: the file cannot be written, is another run's now, or holds something else.
    """

    def __init__(self, path: str, ledger: Ledger, without_errors: bool = False) -> None:
        self._path = path
        self._fd = _open(path)
        try:
            if stat.S_ISREG(os.fstat(self._fd).st_mode) and path != STANDARD:
                _lock(path, self._fd)
                if without_errors:
                    try:
                        self._fd = _rewritten(path, self._fd)
                    except OSError as error:
                        raise ConfigError(f"{path}: --retry-errors: {error.strerror}") from None
                os.ftruncate(self._fd, _read(path, self._fd, ledger))
                os.lseek(self._fd, 0, os.SEEK_END)
        except BaseException:
            os.close(self._fd)
            raise

    def is_file(self, other: int) -> bool:
        """Whether this descriptor is of the same file."""
        return os.path.samestat(os.fstat(self._fd), os.fstat(other))

    def append(self, line: bytes) -> None:
        """Write a line, whole and at once.

        Raises:
            NanocoreError: it cannot be.
        """
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            raise NanocoreError(
                f"{self._path}: a result cannot be written: {error.strerror}"
            ) from None

    def close(self) -> None:
        """The next run may have it."""
        os.close(self._fd)


def _open(path: str) -> int:
    if path == STANDARD:
        return os.dup(sys.stdout.fileno())
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: results go there") from None


def _lock(path: str, fd: int) -> None:
    """Raises ConfigError: it is another run's, or that has put another file in its place."""
    with suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path)):
            return
    raise ConfigError(f"{path}: another run writes its results there")


def _read(path: str, fd: int, ledger: Ledger) -> int:
    """Note what is there; returns its bytes without a line that was cut."""
    num_bytes = 0
    for number, line, head in _whole_lines(path, fd):
        num_bytes += len(line)
        if head.is_of_line:
            if head.error is None:
                raise _other_file(path, number)
            ledger.add_bad_line(head.error.line)
        elif not ledger.add_result(head.custom_id or "", head.error is not None):
            raise ConfigError(
                f"{path}: line {number} is a second result of {head.custom_id!r}: choose "
                "another file for results"
            )
    return num_bytes


def _rewritten(path: str, fd: int) -> int:
    """Put a file without the results that are errors in its place; returns its descriptor.

    A run that is killed meanwhile leaves the one or the other.
    """
    path = os.path.realpath(path)
    part = f"{path}.part"
    mode = stat.S_IMODE(os.fstat(fd).st_mode)
    new_fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        fcntl.flock(new_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with open(new_fd, "wb", closefd=False) as file:
            for _, line, head in _whole_lines(path, fd):
                if head.error is None:
                    file.write(line)
        os.fsync(new_fd)
        os.rename(part, path)
    except BaseException:
        os.unlink(part)
        os.close(new_fd)
        raise
    os.close(fd)
    return new_fd


def _whole_lines(path: str, fd: int) -> Iterator[tuple[int, bytes, ResultHead]]:
    """(number, line, what it says) of each; a last line that was cut is left out.

    Raises:
        ConfigError: something else is in the file.
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
        f"{path}: line {number} is no result of a batch, and nothing of it is touched: choose "
        "another file for results"
    )
