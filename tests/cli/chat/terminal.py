"""`nanocore chat` in a terminal of a test's: what it shows is read, keys are pressed."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.cli.served import EXIT_TIMEOUT_S

CTRL_C, CTRL_D, ENTER = "\x03", "\x04", "\r"
_WHERE = "\x1b[6n"
"""Asks where the cursor is."""
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[=>()][0-9A-B]?)")
_IN_A_SESSION = "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"


class Terminal:
    """shown: all that was written to it and looked at, without what moves and colours."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process, self._fd = process, fd
        self.shown = ""
        self._raw = ""
        self._num_places = 0  # that were asked for
        self._seen = 0

    @property
    def pid(self) -> int:
        return self.process.pid

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def resize(self, num_rows: int, num_columns: int) -> None:
        """As a window is made larger or smaller."""
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", num_rows, num_columns, 0, 0))

    def expect(self, text: str) -> str:
        """Wait until this is shown, behind what was expected before; what stands between."""
        deadline_s = time.monotonic() + EXIT_TIMEOUT_S
        while (at := self.shown.find(text, self._seen)) < 0:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self._read(left_s):
                raise AssertionError(f"no {text!r} behind {self.shown[self._seen :]!r}")
        between, self._seen = self.shown[self._seen : at], at + len(text)
        return between

    def exit(self) -> int:
        """Wait for its end; its exit code."""
        while self._read(EXIT_TIMEOUT_S):
            pass
        return self.process.wait(EXIT_TIMEOUT_S)

    def _read(self, patience_s: float) -> bool:
        """Some more; False: nothing comes, or nothing will."""
        ready, _, _ = select.select([self._fd], [], [], patience_s)
        if not ready:
            return False
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # nobody has its other end any more
            return False
        self._raw += data.decode(errors="replace")
        for _ in range(self._raw.count(_WHERE) - self._num_places):
            self._num_places += 1
            self.press("\x1b[1;1R")
        whole = self._raw
        if (cut := whole.rfind("\x1b")) >= 0 and not _ESCAPES.match(whole, cut):
            whole = whole[:cut]  # the rest of an escape comes with the next read
        self.shown = re.sub("\r+\n", "\n", _ESCAPES.sub("", whole))
        return bool(data)


@contextmanager
def chatting(*arguments: str, num_columns: int = 100, **environment: str) -> Iterator[Terminal]:
    """Start it; killed with the block, if it has not ended."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 30, num_columns, 0, 0))
    known = {"TERM": "xterm-256color"} | environment
    command = (sys.executable, "-m", "nanocore", "chat")
    process = subprocess.Popen(
        [sys.executable, "-c", _IN_A_SESSION, *command, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | known,
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
