"""Safe use of standard streams that are closed, full or not read.

A descriptor that is closed at the start would be reused by the next file or socket, which then gets
what libraries print. A stream without a reader, or on a full disk, would change the exit code to
Python's own. A full pipe or a stopped terminal would block the thread that logs, and with it all
clients.
"""

from __future__ import annotations

import logging
import os
import re
import select
import sys
from contextlib import suppress
from typing import Final

STDERR_FD: Final = 2
BROKEN_PIPE: Final = 141
"""Exit code of a command whose reader has gone; a shell reports SIGPIPE this way."""
_WRITE_TIMEOUT_MS: Final = 100
_HARMFUL: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters, bidirectional overrides, and halves of surrogate pairs."""


def harmless(text: str) -> str:
    """Escape what could move the cursor, change colours or reverse text, except for new lines and
    tabs, and what scripts and emoji are written with."""
    return _HARMFUL.sub(_escaped, text.replace("\r\n", "\n"))


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def open_missing() -> None:
    """Open closed descriptors 0 to 2 on the null device. Call this first in a process."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest free number is this one. Ranks inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 - for the life of the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the life of the process


class LogHandler(logging.Handler):
    """Writes lines to stderr, and drops them if the reader is too slow."""

    def __init__(self) -> None:
        super().__init__()
        self._timeout_ms = _WRITE_TIMEOUT_MS

    def emit(self, record: logging.LogRecord) -> None:
        # The handler's lock is held.
        data = (self.format(record) + "\n").encode(errors="backslashreplace")
        with suppress(OSError):
            # A writable pipe takes PIPE_BUF bytes without blocking.
            for start in range(0, len(data), select.PIPE_BUF):
                if not can_be_written(self._timeout_ms):
                    self._timeout_ms = 0  # do not wait again until the reader reads
                    return
                os.write(STDERR_FD, data[start : start + select.PIPE_BUF])
        self._timeout_ms = _WRITE_TIMEOUT_MS


def can_be_written(timeout_ms: int = _WRITE_TIMEOUT_MS) -> bool:
    """Return whether stderr becomes writable in time."""
    poll = select.poll()
    poll.register(STDERR_FD, select.POLLOUT)
    return bool(poll.poll(timeout_ms))


def complain(text: str) -> None:
    """Write a harmless line to stderr, if somebody reads it.

    It is one write, also if unbuffered, since an engine and its server may complain at once.
    """
    if can_be_written():
        with suppress(OSError):
            sys.stderr.write(f"{harmless(text)}\n")
            sys.stderr.flush()


def flush_or_drop() -> None:
    """Flush the streams, and drop what cannot be written. Call this last in a process."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
