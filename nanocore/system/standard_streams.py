"""A process's standard streams: whatever became of them, no engine or server is to end of it.

A descriptor that was closed before we began would be given to the next file or socket that is
opened, and then get what libraries write to it. A stream whose reader is gone, or whose disk is
full, would turn the exit code into Python's own. One whose reader does not read, a pipe that is
full or a terminal that is held, would stop the thread that logs, and all clients with it.
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
"""Exit code of a command whose reader has gone: what a shell says of one that SIGPIPE ended."""
_PATIENCE_MS: Final = 100
_HARMFUL: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters, what turns the direction of a text around, and halves of surrogate pairs."""


def harmless(text: str) -> str:
    """It with what would move, colour or turn others as it is written in strings; new lines and
    tabs stay, and so does what scripts and emoji are written with."""
    return _HARMFUL.sub(_escaped, text.replace("\r\n", "\n"))


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def open_missing() -> None:
    """Give descriptors 0 to 2, where they are closed, to the null device. First in a process."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # It gets the lowest number that is free. Ranks inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 - for as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives


class LogHandler(logging.Handler):
    """Writes lines to stderr, and drops what its reader does not take in time."""

    def __init__(self) -> None:
        super().__init__()
        self._poll = select.poll()
        self._poll.register(STDERR_FD, select.POLLOUT)
        self._patience_ms = _PATIENCE_MS

    def emit(self, record: logging.LogRecord) -> None:
        """Called under the handler's lock."""
        data = (self.format(record) + "\n").encode(errors="backslashreplace")
        with suppress(OSError):
            # A pipe that can be written to takes so many bytes at once.
            for start in range(0, len(data), select.PIPE_BUF):
                if not self._poll.poll(self._patience_ms):
                    self._patience_ms = 0  # until it is read again
                    return
                os.write(STDERR_FD, data[start : start + select.PIPE_BUF])
        self._patience_ms = _PATIENCE_MS


def can_be_written(patience_ms: int = _PATIENCE_MS) -> bool:
    """Whether stderr takes something within that time."""
    poll = select.poll()
    poll.register(STDERR_FD, select.POLLOUT)
    return bool(poll.poll(patience_ms))


def complain(text: str) -> None:
    """Write a line to stderr, if anybody is there to read it; what peers said in it does no harm.

    In one write, unbuffered too: an engine and its server complain at once, and of the same thing.
    """
    if can_be_written():
        with suppress(OSError):
            sys.stderr.write(f"{harmless(text)}\n")
            sys.stderr.flush()


def flush_or_drop() -> None:
    """Write out what is buffered; what cannot be written is forgotten. Last thing in a process."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
