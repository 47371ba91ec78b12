"""The tie between an engine and the client that launched it; nothing survives its owner.

Two independent ties, armed before anything heavy is imported: the kernel signals us when the parent
dies, and a socket pair closes with it. Over the same pair the engine says that it is ready, or why
it could not start, so that a failure reaches the launching client with its cause, and the client
names the directory that it has made for this engine, which goes with either.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable
from typing import Final

import msgspec

from nanocore.protocol.errors import StartError
from nanocore.protocol.start import StartReport
from nanocore.system.lifeline import signal_at_parent_death

GRACE_S: Final = 4.0
"""How long an orphaned engine may take to leave by itself."""


class ParentLink:
    """The engine's end of the pair.

    Args:
        fd: inherited from the launching client.
    """

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)
        self._heard = b""  # the directory's path and a zero
        atexit.register(self._remove_directory)
        self._on_orphaned: Callable[[], None] = lambda: None
        # Not SIGTERM, of which a second one would mean "at once": the kernel sends this one each
        # time a thread of the dying parent hands us on to the next.
        signal_at_parent_death(signal.SIGHUP)
        threading.Thread(target=self._watch, name="parent-watch", daemon=True).start()

    def on_orphaned(self, shut_down: Callable[[], None]) -> None:
        """What to try when the parent is gone, before leaving the hard way."""
        self._on_orphaned = shut_down

    def report_ready(self) -> None:
        """Tell the parent that the engine serves."""
        self._send(StartReport())

    def report_failure(self, error: StartError) -> None:
        """Tell the parent why there will be no engine."""
        text = str(error).encode(errors="backslashreplace").decode()  # it may quote any bytes
        self._send(StartReport(text, error.exit_code))

    def _send(self, report: StartReport) -> None:
        try:
            self._socket.sendall(msgspec.json.encode(report) + b"\n")
        except OSError:
            self._on_orphaned()  # nobody listens: the watch thread sees the same

    def _watch(self) -> None:
        while data := self._recv():
            self._heard += data
        self._on_orphaned()
        threading.Event().wait(GRACE_S)
        self._remove_directory()
        os._exit(StartError.exit_code)

    def _remove_directory(self) -> None:
        """The client does the same, if it is still there."""
        if self._heard.endswith(b"\0"):
            shutil.rmtree(self._heard[:-1], ignore_errors=True)

    def _recv(self) -> bytes:
        try:
            return self._socket.recv(64)
        except OSError:
            return b""
