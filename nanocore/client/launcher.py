"""Starts an engine process for a client, hears whether it is ready, and ends it.

The two hold one socket pair between them: over it comes the engine's start report, and each side
takes its closing for the other's death. The engine listens in a fresh private directory, whose path
goes the other way, so that the last of the two can remove it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

import msgspec

from nanocore.client.launch_directory import LaunchDirectory
from nanocore.protocol.endpoint import IPC, ipc_address
from nanocore.protocol.errors import ConfigError, EngineStartError
from nanocore.protocol.start import StartReport

STOP_TIMEOUT_S: Final = 10.0
COMMAND: Final = (sys.executable, "-m", "nanocore.engine_core")


class EngineProcess:
    """A `nanocore-engine` of our own.

    flags: of `engine_flags`.

    Raises:
        EngineStartError: there is no room for its directory, or for a process.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        with ExitStack() as failing:
            try:
                self._directory = LaunchDirectory()
                failing.callback(self._directory.remove)
                self.endpoint = f"{IPC}{self._directory.path / 'engine.sock'}"
                ipc_address(self.endpoint)
                self._link, engine_end = socket.socketpair()
                failing.callback(self._link.close)
                with engine_end:
                    self._link.sendall(os.fsencode(self._directory.path) + b"\0")
                    self._process = self._start(engine_end.fileno(), flags)
            except (OSError, ConfigError) as error:
                raise EngineStartError(f"no engine process could be started: {error}") from None
            failing.pop_all()
        self._link.setblocking(False)

    def _start(self, parent_fd: int, flags: Sequence[str]) -> subprocess.Popen[bytes]:
        # Its own session: Ctrl-C reaches the client, which then ends the engine in order.
        return subprocess.Popen(
            [*COMMAND, f"--parent-fd={parent_fd}", f"--listen={self.endpoint}", *flags],
            pass_fds=[parent_fd],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until the engine serves.

        Raises:
            EngineStartError: it could not start, for the reason it gives, or took too long.
        """
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._read_line()
        except TimeoutError:
            raise EngineStartError(
                f"the engine was not ready after {timeout_s} s: raise start_timeout_s if the model "
                "is large"
            ) from None
        if not line:
            code = await asyncio.to_thread(self._process.wait)
            raise EngineStartError(f"the engine died at start with exit code {code}", code)
        report = msgspec.json.decode(line, type=StartReport)
        if report.error is not None:
            raise EngineStartError(report.error, report.exit_code)

    async def wait_exit(self) -> int:
        """Wait until the process is gone; returns its exit code."""
        while await self._read():
            pass
        return await asyncio.to_thread(self._process.wait)

    async def stop(self) -> None:
        """End the process, kindly and then firmly, and remove its directory. Idempotent.

        Whoever is cancelled meanwhile wants it over now: the process is killed.
        """
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._process.kill()  # no effect if it has ended
            self._process.wait()
            self._link.close()
            self._directory.remove()

    async def _read_line(self) -> bytes:
        """One line from the engine; empty if it closed its end first."""
        line = b""
        while not line.endswith(b"\n"):
            data = await self._read()
            if not data:
                return b""
            line += data
        return line

    async def _read(self) -> bytes:
        """Some bytes of the engine's report; empty once its end is closed."""
        try:
            return await asyncio.get_running_loop().sock_recv(self._link, 65536)
        except ConnectionResetError:
            return b""
