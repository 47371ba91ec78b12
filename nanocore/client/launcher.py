"""Starts an engine process for a client, hears whether it is ready, and ends it.

The two hold one socket pair between them: over it comes the engine's start report, and each side
takes its closing for the other's death. The engine listens in a private directory, whose path goes
the other way, so that an engine which outlives its client can remove it. What an engine that was
killed has started is killed after it: nothing of it may hold what the next one needs.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import msgspec

from nanocore.client.launch_directory import LaunchDirectory
from nanocore.protocol.endpoint import IPC, ipc_address
from nanocore.protocol.errors import ConfigError, EngineStartError, StartReport
from nanocore.system.child_process import module_command

STOP_TIMEOUT_S: Final = 10.0
COMMAND: Final = module_command("nanocore.engine_core")


class EngineProcess:
    """A `nanocore-engine` of our own.

    Args:
        flags: of `engine_flags`. directory: where it listens. output_fd: where what it writes goes;
            None: where ours does.

    Raises:
        EngineStartError: there is no room for a process, or the directory's path is too long.
    """

    def __init__(
        self, flags: Sequence[str], directory: LaunchDirectory, output_fd: int | None = None
    ) -> None:
        with ExitStack() as failing:
            try:
                self.endpoint = f"{IPC}{directory.path / 'engine.sock'}"
                ipc_address(self.endpoint)
                self._link, engine_end = socket.socketpair()
                failing.callback(self._link.close)
                with engine_end:
                    self._link.sendall(os.fsencode(directory.path) + b"\0")
                    self._process = self._start(engine_end.fileno(), flags, output_fd)
                self._pidfd = os.pidfd_open(self._process.pid)
            except (OSError, ConfigError) as error:
                raise EngineStartError(f"no engine process could be started: {error}") from None
            failing.pop_all()
        self._link.setblocking(False)
        self._heard = b""
        self.stands_by = False
        """Whether it has said that all is loaded, and that it waits for its endpoint."""

    def _start(
        self, parent_fd: int, flags: Sequence[str], output_fd: int | None
    ) -> subprocess.Popen[bytes]:
        # Its own session: Ctrl-C reaches the client, which then ends the engine in order.
        return subprocess.Popen(
            [*COMMAND, f"--parent-fd={parent_fd}", f"--listen={self.endpoint}", *flags],
            pass_fds=[parent_fd],
            stdin=subprocess.DEVNULL,
            stdout=output_fd,
            stderr=output_fd,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The engine's process id."""
        return self._process.pid

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until the engine serves; one that stands by has all the time of the other one.

        Raises:
            EngineStartError: it could not start, for the reason it gives, or took too long.
        """
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                while (report := await self._read_report()) is not None and report.standing_by:
                    self.stands_by = True
                    deadline.reschedule(None)  # the other one may live long
        except TimeoutError:
            raise EngineStartError(
                f"the engine was not ready after {timeout_s} s: raise start_timeout_s if the model "
                "is large"
            ) from None
        if report is None:
            code = await asyncio.to_thread(self._reap)
            raise EngineStartError(f"the engine died at start with exit code {code}", code)
        if report.error is not None:
            raise EngineStartError(report.error, report.exit_code)

    async def wait_death(self) -> None:
        """Wait until its end of the socket pair closes, which is before the process is gone."""
        while await self._read():
            pass

    async def wait_exit(self) -> int:
        """Wait until the process is gone, and end what it has left; returns its exit code."""
        await self.wait_death()
        return await asyncio.to_thread(self._reap)

    async def stop(self) -> None:
        """End the process, kindly and then firmly, and what is its. Idempotent.

        Whoever is cancelled meanwhile wants it over now: the process is killed.
        """
        if self._pidfd < 0:
            return
        self._signal(signal.SIGTERM)
        with suppress(OSError):  # a drain would wait for others' requests, too: we are gone
            self._link.shutdown(socket.SHUT_WR)
        try:
            await asyncio.to_thread(_wait, self._pidfd, STOP_TIMEOUT_S)
        finally:
            self.kill()

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process; not a debugger, which is looking at it."""
        with suppress(OSError):
            stat = Path(f"/proc/{self.pid}/stat").read_text("utf-8", "replace")
            return stat.rpartition(")")[2].split()[0] == "T"
        return False

    def strike(self) -> None:
        """Kill the process, and leave the rest to `kill`."""
        self._signal(signal.SIGKILL)

    def kill(self) -> None:
        """End the process at once, and what is its. Idempotent."""
        if self._pidfd < 0:
            return
        self.strike()
        self._reap()
        os.close(self._pidfd)
        self._pidfd = -1
        self._link.close()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def _reap(self) -> int:
        """Wait for the process and kill what it has left, its ranks above all; its exit code.

        As long as nobody has waited for the process, its number is that of no other group.
        """
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    async def _read_report(self) -> StartReport | None:
        """One line from the engine; None if it closed its end first."""
        while b"\n" not in self._heard:
            data = await self._read()
            if not data:
                return None
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return msgspec.json.decode(line, type=StartReport)

    async def _read(self) -> bytes:
        """Some bytes of the engine's report; empty once its end is closed."""
        try:
            return await asyncio.get_running_loop().sock_recv(self._link, 65536)
        except ConnectionResetError:
            return b""


def _wait(pidfd: int, timeout_s: float) -> None:
    """For the end of this process, no longer."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll(timeout_s * 1e3)
