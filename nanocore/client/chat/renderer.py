"""The parent's side of the process in which a chat template runs (`render_process`)."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from nanocore.protocol.errors import InvalidRequestError, NanocoreError, shorten
from nanocore.system.child_process import is_stopped

MAX_CPU_S: Final = 2.0
"""CPU time limit of one rendering; the first one includes compiling the template."""
MAX_WALL_S: Final = 30.0
"""Time limit of one rendering, and of starting the process; reached only on a hung machine."""
MAX_MEMORY: Final = 256 << 20
"""Bytes that the process may allocate in addition to those at its start."""
MAX_OUTPUT_FACTOR: Final = 4
MAX_OUTPUT_CHARS: Final = 1 << 20
"""A prompt has at most this many characters plus MAX_OUTPUT_FACTOR times the request's."""
_MAX_REASON_CHARS: Final = 200
_ENDED: Final = "the process that renders chat templates was ended: its client is closed"
_LENGTH: Final = struct.Struct("!I")
_ENVIRONMENT: Final = ("TZ", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH")
"""Environment variables that are passed to the process."""


class RenderProcessError(NanocoreError):
    """The process that renders chat templates does not start; the request is not to blame."""


class Renderer:
    """Renders one template in its own process, which is started when needed and restarted after its
    end.

    Threads may share it: they take turns. The process ends with this object, and with our process,
    however that ends, because its socket closes. After a fork the child starts its own.

    Args:
        template: its source. source: where it comes from, for error messages.
    """

    def __init__(self, template: str, source: str) -> None:
        self._template = template.encode("utf-8", "surrogatepass")
        self._source = source
        self._reset()

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._is_ending = False
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._finalizer: weakref.finalize[..., Renderer] | None = None

    def render(self, variables: Mapping[str, Any], now: datetime) -> str:
        """Return the rendered text. variables: JSON values. now: time of the template's clock.

        Raises:
            InvalidRequestError: the template fails, or passes a limit.
            RenderProcessError: its process does not start, or is killed.
        """
        try:
            data = json.dumps(variables)
        except RecursionError as error:
            raise self._failure(f"the request is nested too deeply: {error}") from None
        max_chars = MAX_OUTPUT_FACTOR * len(data) + MAX_OUTPUT_CHARS
        request = (
            f'{{"now": "{now.isoformat()}", "max_chars": {max_chars}, "variables": {data}}}'
        ).encode()
        if self._owner != os.getpid():  # after a fork: the process is the parent's
            self._reset()
        with self._lock:
            try:
                status, text = self._rendered(request)
                if status == "m" or self._is_ending:
                    self.close()
            except (
                BaseException
            ):  # also after an interrupt: a late reply would be taken for that of the next request
                self.close()
                raise
            finally:
                self._is_ending = False
        if status == "t":
            return text
        if status == "o":
            text = (
                f"it writes more than {max_chars} characters, the limit for a request of "
                f"{len(data)}"
            )
        elif status == "m":
            text = f"it takes more than {MAX_MEMORY >> 20} MiB of memory, the limit"
        raise self._failure(text)

    def _rendered(self, request: bytes) -> tuple[str, str]:
        """Return status and text."""
        process = self._process
        if process is None or process.poll() is not None or is_stopped(process.pid):
            self.close()
            self._start()
        # `end` sets this before it looks for the process: either it kills the new one, or it came
        # first and this sees the flag.
        if self._is_ending:
            raise RenderProcessError(_ENDED)
        return self._exchange(request)

    def end(self) -> None:
        """Kill the process, if there is one, even while it renders; any thread may call this."""
        self._is_ending = True
        if self._lock.acquire(blocking=False):
            try:
                self.close()
                self._is_ending = False
            finally:
                self._lock.release()
        elif (process := self._process) is not None:
            process.kill()  # the thread that waits for the reply closes the rest

    def close(self) -> None:
        """End the process, if there is one; no thread may be waiting for it."""
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._socket = self._finalizer = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        limits = [str(MAX_CPU_S), str(MAX_MEMORY)]
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment["NANOCORE_SYS_PATH"] = os.pathsep.join(filter(os.path.isabs, sys.path))
        program = str(Path(__file__).with_name("render_process.py"))
        if not sys.executable or not os.path.exists(program):
            ours.close()
            theirs.close()
            raise RenderProcessError(
                f"cannot start the chat template process: {sys.executable!r} runs {program}, and "
                "both must be files"
            )
        try:
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-sSPB", "-X", "utf8", program, *limits],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,  # of a start alone
                    cwd="/",
                    env=environment,
                    start_new_session=True,  # the terminal's signals are not for it
                )
        except (OSError, ValueError) as error:
            ours.close()
            raise RenderProcessError(f"cannot start the chat template process: {error}") from None
        self._process, self._socket = process, ours
        self._finalizer = weakref.finalize(self, _end, process, ours, self._owner)
        deadline = time.monotonic() + MAX_WALL_S
        try:
            self._receive(_LENGTH.size, deadline)
            self._send(self._template, deadline)
        except (OSError, EOFError) as error:
            ours.close()
            process.kill()
            assert process.stderr is not None
            words = process.stderr.read().decode("utf-8", "replace").strip()
            raise RenderProcessError(
                f"the process to render chat templates in ({sys.executable}) does not start: "
                f"{words[-_MAX_REASON_CHARS:] or str(error) or 'it ended at once'}; is jinja2 "
                "installed there?"
            ) from None
        finally:
            assert process.stderr is not None
            process.stderr.close()

    def _exchange(self, request: bytes) -> tuple[str, str]:
        deadline = time.monotonic() + MAX_WALL_S
        try:
            self._send(request, deadline)
            (length,) = _LENGTH.unpack(self._receive(_LENGTH.size, deadline))
            reply = self._receive(length, deadline)
        except TimeoutError:
            raise self._failure(f"it takes more than {MAX_WALL_S:.0f} s, the limit") from None
        except (OSError, EOFError):
            raise self._death() from None
        return reply[:1].decode(), reply[1:].decode("utf-8", "surrogatepass")

    def _send(self, content: bytes, deadline: float) -> None:
        assert self._socket is not None
        self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
        self._socket.sendall(_LENGTH.pack(len(content)) + content)

    def _receive(self, length: int, deadline: float) -> bytes:
        assert self._socket is not None
        content = b""
        pieces = []
        while length:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            content = self._socket.recv(min(length, 1 << 20))
            if not content:
                raise EOFError
            pieces.append(content)
            length -= len(content)
        return b"".join(pieces)

    def _status(self) -> int | None:
        """Return the exit status, waiting up to a second; None while it runs."""
        assert self._process is not None
        try:
            return self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return None

    def _death(self) -> Exception:
        status = self._status()
        if status == -signal.SIGPROF:
            return self._failure(f"it takes more than {MAX_CPU_S:g} s of CPU time, the limit")
        if status == -signal.SIGKILL:
            return RenderProcessError(
                _ENDED
                if self._is_ending
                else f"the process that renders the chat template of {self._source} was killed "
                "(SIGKILL): is the machine out of memory?"
            )
        return self._failure(
            f"its process ended (status {status}): does it pass a limit of memory or depth?"
        )

    def _failure(self, reason: str) -> InvalidRequestError:
        return InvalidRequestError(f"the chat template of {self._source} failed: {shorten(reason)}")


def _end(process: subprocess.Popen[bytes], ours: socket.socket, owner: int) -> None:
    ours.close()
    if owner == os.getpid():
        process.kill()
        process.wait()
