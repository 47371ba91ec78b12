"""A launched engine: its process and the private directory in which it listens.

Client and engine are connected by a socket pair. The engine sends its start report over it, and
each side takes a closed socket for the other's death. The client sends the directory's path, so
that an engine that outlives its client can remove it. The children of a killed engine are killed
too: they hold memory and devices that the next engine needs.

The directory is removed by the client, by the engine as it ends, or, if both were killed, by the
next launch. The client holds a flock on it as long as it is in use.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import msgspec

from nanocore.protocol.endpoint import IPC, ipc_address
from nanocore.protocol.errors import ConfigError, EngineStartError, StartFile, StartReport
from nanocore.system.child_process import module_command

_PREFIX: Final = "nanocore-launch-"


class LaunchDirectory:
    """A new directory of mode 0700 below the user's directory for temporary files.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            if os.fstat(self._fd).st_nlink:
                break
            # Another launch removed the directory as stale before it was locked: try again.
            os.close(self._fd)
        self._remove_left_over()

    def remove(self) -> None:
        """Remove it with everything in it. Idempotent."""
        if self._fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._fd)
            self._fd = -1

    def _remove_left_over(self) -> None:
        for path in self.path.parent.glob(f"{_PREFIX}*"):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                continue  # removed meanwhile, or another user's
            try:
                if os.fstat(fd).st_uid == os.getuid():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            except BlockingIOError:
                pass  # in use
            finally:
                os.close(fd)


STOP_TIMEOUT_S: Final = 10.0
COMMAND: Final = module_command("nanocore.engine_core")


class EngineProcess:
    """Process of a launched `nanocore-engine`.

    Args:
        flags: of `engine_flags`. directory: for its endpoint. output_fd: for its stdout and stderr;
            None inherits ours.

    Raises:
        EngineStartError: no process can be started, or the directory's path is too long.
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
        """Whether it has reported that it has loaded everything and waits for its endpoint."""

    def _start(
        self, parent_fd: int, flags: Sequence[str], output_fd: int | None
    ) -> subprocess.Popen[bytes]:
        # Its own session: Ctrl-C reaches only the client, which then stops the engine in order.
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

    async def wait_ready(
        self, timeout_s: float, on_files: Callable[[list[StartFile]], None] = lambda _: None
    ) -> None:
        """Wait until the engine serves; a standby waits without limit for the active engine's end.

        on_files: hears of the model's files before, if the user's cache folder has them.

        Raises:
            EngineStartError: it could not start, for the reason it gives, or took too long.
        """
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                while (report := await self._read_report()) is not None:
                    if report.files is not None:
                        on_files(report.files)
                    elif report.standing_by:
                        self.stands_by = True
                        deadline.reschedule(None)  # the active engine may live long
                    else:
                        break
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
        """Wait until it closes its end of the socket pair, shortly before the process is gone."""
        while await self._read():
            pass

    async def wait_exit(self) -> int:
        """Wait until the process is gone, and kill its remaining children; return its exit code."""
        await self.wait_death()
        return await asyncio.to_thread(self._reap)

    async def stop(self) -> None:
        """Stop the process by SIGTERM, then SIGKILL, and its children. Idempotent.

        If the caller is cancelled meanwhile, the process is killed at once.
        """
        if self._pidfd < 0:
            return
        self._signal(signal.SIGTERM)
        with suppress(OSError):  # a closed link tells it not to wait for other clients' requests
            self._link.shutdown(socket.SHUT_WR)
        try:
            await asyncio.to_thread(_wait, self._pidfd, STOP_TIMEOUT_S)
        finally:
            self.kill()

    def strike(self) -> None:
        """Send SIGKILL; `kill` then frees the resources."""
        self._signal(signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process and its children, and free its resources. Idempotent."""
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
        """Wait for the process, kill its remaining children (ranks), and return its exit code.

        The group is killed before the process is reaped, while its number cannot be reused.
        """
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()

    async def _read_report(self) -> StartReport | None:
        """Read one line; None if the engine closed its end first."""
        while b"\n" not in self._heard:
            data = await self._read()
            if not data:
                return None
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return msgspec.json.decode(line, type=StartReport)

    async def _read(self) -> bytes:
        try:
            return await asyncio.get_running_loop().sock_recv(self._link, 65536)
        except ConnectionResetError:
            return b""


def _wait(pidfd: int, timeout_s: float) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll(timeout_s * 1e3)
