"""The engine's standard streams: whatever became of them, the engine is not to end of it.

A descriptor that was closed before we began would be given to the next file or socket that is
opened, and then get what libraries write to it. A stream whose reader is gone, or whose disk is
full, would turn the exit code into Python's own.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def open_missing() -> None:
    """Give descriptors 0 to 2, where they are closed, to the null device. First in a process."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # It gets the lowest number that is free. Ranks inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives


def complain(text: str) -> None:
    """Write a line to stderr, if anybody is there to read it."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


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
