"""The tie between an engine and the client that launched it: the engine ends with its client.

Two independent ties, armed before anything heavy is imported: the kernel signals us when the parent
dies, and a socket pair closes with it. Over the same pair the engine reports that it is ready, or
why it could not start, and the client names the directory that it has made for its engines: whoever
outlives the other removes it.
"""

from __future__ import annotations

import atexit
import os
import select
import shutil
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Final

import msgspec

from nanocore.protocol.errors import StartError, StartReport
from nanocore.system.child_process import signal_at_parent_death

GRACE_S: Final = 4.0
"""Time in which an orphaned engine may end by itself."""


class ParentLink:
    """The engine's end of the socket pair.

    Args:
        fd: inherited from the launching client.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        self._heard = b""  # the directory's path and a zero
        atexit.register(self._leave)
        self._grace_s = 0.0
        """Time to wait for the parent's end once it was announced."""
        self._on_orphaned: Callable[[], None] = lambda: None
        # Not SIGTERM, of which a second one would mean "at once": the kernel sends this one each
        # time a thread of the dying parent hands us on to the next.
        signal_at_parent_death(signal.SIGHUP)
        threading.Thread(target=self._watch, name="parent-watch", daemon=True).start()

    def on_orphaned(self, shut_down: Callable[[], None]) -> None:
        """Set what to try when the parent is gone, before exiting at once. For the main thread."""
        self._on_orphaned = shut_down
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(signal.SIGHUP, self._on_hang_up)

    def report_failure(self, error: StartError) -> None:
        text = str(error).encode(errors="backslashreplace").decode()  # it may quote any bytes
        self.report(StartReport(text, error.exit_code))

    def report(self, report: StartReport) -> None:
        """Tell the client how far the start is."""
        try:
            self._socket.sendall(msgspec.json.encode(report) + b"\n")
        except OSError:
            self._on_orphaned()  # nobody listens: the watch thread sees the same

    def _watch(self) -> None:
        with suppress(OSError):
            while data := self._socket.recv(64):
                self._heard += data
        self._on_orphaned()
        threading.Event().wait(GRACE_S)
        self._remove_directory()
        os._exit(StartError.exit_code)

    def _on_hang_up(self, _number: int, _frame: FrameType | None) -> None:
        """Handle the end of a thread of the parent; usually it is the parent that ends."""
        self._grace_s = GRACE_S
        self._on_orphaned()

    def _leave(self) -> None:
        """Remove the directory, unless the parent lives on: it may start another engine in it."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        if poll.poll(self._grace_s * 1e3):
            self._remove_directory()

    def _remove_directory(self) -> None:
        if self._heard.endswith(b"\0"):
            shutil.rmtree(self._heard[:-1], ignore_errors=True)
