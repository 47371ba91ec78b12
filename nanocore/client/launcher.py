"""Starts an engine process for a client, hears whether it is ready, and ends it.

The two hold one socket pair between them: over it comes the engine's start report, and each side
takes its closing for the other's death. The engine listens in a fresh private directory.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from nanocore.protocol.endpoint import IPC
from nanocore.protocol.errors import EngineStartError
from nanocore.protocol.start import StartReport

EngineArgument = str | int | float | bool | None
STOP_TIMEOUT_S: Final = 10.0


class EngineProcess:
    """A `nanocore-engine` of our own.

    Args:
        arguments: its flags, named as in Python: max_num_seqs=8 is --max-num-seqs 8.
    """

    def __init__(self, arguments: dict[str, EngineArgument]) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="nanocore-"))
        self.endpoint = f"{IPC}{self._directory / 'engine.sock'}"
        self._link, engine_end = socket.socketpair()
        self._link.setblocking(False)
        command = [
            sys.executable, "-m", "nanocore.engine_core",
            "--parent-fd", str(engine_end.fileno()), "--listen", self.endpoint,
            *_flags(arguments),
        ]  # fmt: skip
        # Its own session: Ctrl-C reaches the client, which then ends the engine in order.
        self._process = subprocess.Popen(
            command,
            pass_fds=[engine_end.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        engine_end.close()

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
        while await asyncio.get_running_loop().sock_recv(self._link, 1):
            pass
        return await asyncio.to_thread(self._process.wait)

    async def stop(self) -> None:
        """End the process, kindly and then firmly, and remove its directory. Idempotent."""
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        finally:
            self._link.close()
            shutil.rmtree(self._directory, ignore_errors=True)

    async def _read_line(self) -> bytes:
        """One line from the engine; empty if it closed its end first."""
        loop = asyncio.get_running_loop()
        line = b""
        while not line.endswith(b"\n"):
            try:
                data = await loop.sock_recv(self._link, 65536)
            except ConnectionResetError:
                data = b""
            if not data:
                return b""
            line += data
        return line


def _flags(arguments: dict[str, EngineArgument]) -> list[str]:
    flags: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            flags += [f"--{flag}", str(value)]
    return flags
