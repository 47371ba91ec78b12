"""EngineSupervisor: restarts a launched engine when it dies, at the same endpoint.

An engine that dies by a signal or an internal error is replaced, first at once and then with
growing pauses, up to `max_restarts` times in a row. An engine that was told to stop is not
replaced, nor is one whose flags or files are invalid. With a standby, a second engine has loaded
everything and waits for the endpoint's lock: it serves as soon as the kernel releases the lock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from nanocore.client.connection.engine_process import EngineProcess, LaunchDirectory
from nanocore.protocol.errors import (
    AddressInUseError,
    CacheMemoryError,
    EngineDeadError,
    EngineStartError,
    NanocoreError,
    StartError,
    StartFile,
    counted,
)
from nanocore.system.child_process import is_stopped

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.5
_MAX_PAUSE_S: Final = 8.0
"""Pauses before a restart that is not the first in a row."""
_SETTLED_S: Final = 30.0
"""Time of serving after which the count of restarts in a row is reset."""
_STOPPED_POLL_S: Final = 1.0
_MAX_STOPPED_POLLS: Final = 10
"""Consecutive polls that find the engine stopped (SIGSTOP) before it is replaced. Polls are
counted, not seconds: a client that was stopped together with its engine must not kill it."""
_DEATHS: Final = {StartError.exit_code, CacheMemoryError.exit_code}
_FAILED_STARTS: Final = {*_DEATHS, AddressInUseError.exit_code}
"""Exit codes that may be caused by memory or the address that the last engine still holds."""


class EngineSupervisor:
    """Supervisor of one launched engine, from `start` to `stop`, in one event loop.

    Args:
        flags: of `engine_flags`. max_restarts: consecutive restarts before giving up; `progress`
            and 30 s of serving reset the count. standby: keep a second engine loaded while the
            first one serves. output_fd: for engines' stdout and stderr; None inherits ours.

    Attributes:
        ended: why there will be no engine any more; None until then. is_restarting: between an
            engine's death and the next one's readiness, or the end.
            last_death_s, last_ready_s: when the last death was noticed and an engine last became
            ready, by time.monotonic(); 0 before.
    """

    def __init__(
        self,
        flags: Sequence[str],
        max_restarts: int = 5,
        standby: bool = False,
        output_fd: int | None = None,
    ) -> None:
        self.ended: NanocoreError | None = None
        self.is_restarting = False
        self.last_death_s = 0.0
        self.last_ready_s = 0.0
        self._files: list[StartFile] = []
        self._on_files: list[Callable[[Sequence[StartFile]], None]] = []
        self._on_death: list[Callable[[int], None]] = []
        self._on_ready: list[Callable[[], None]] = []
        self._on_ended: list[Callable[[NanocoreError], None]] = []
        self._flags = flags
        self._max_restarts = max_restarts
        self._has_standby = standby
        self._output_fd = output_fd
        self._timeout_s = 0.0
        self._num_in_a_row = 0
        self._directory: LaunchDirectory | None = None
        self._active: EngineProcess | None = None
        self._processes: list[EngineProcess] = []  # all that may still exist
        self._successor: asyncio.Task[EngineProcess] | None = None
        self._keeping: asyncio.Task[None] | None = None

    def on_files(self, callback: Callable[[Sequence[StartFile]], None]) -> None:
        """Register a callback for the files that the first engine will offer, long before it
        serves; see `StartReport`.
        """
        self._on_files.append(callback)
        if self._files:
            callback(self._files)

    def on_death(self, callback: Callable[[int], None]) -> None:
        """Register a callback for deaths of engines; gets the exit code, negative for a signal."""
        self._on_death.append(callback)

    def on_ready(self, callback: Callable[[], None]) -> None:
        """Register a callback for the next engine's readiness."""
        self._on_ready.append(callback)

    def on_ended(self, callback: Callable[[NanocoreError], None]) -> None:
        """Register a callback for the end, when no engine follows; not called after `stop`."""
        self._on_ended.append(callback)

    async def start(self, timeout_s: float) -> None:
        """Start the engine and wait until it serves. timeout_s: for this and each later start.

        Raises:
            EngineStartError: it could not start or took too long. Nothing of it remains then.
        """
        self._timeout_s = timeout_s
        try:
            try:
                self._directory = LaunchDirectory()
            except OSError as error:
                raise EngineStartError(f"no engine process could be started: {error}") from None
            active = self._launch()
            self._active = active
            await active.wait_ready(timeout_s, self._hear_of_files)
        except BaseException:
            await self.stop()
            raise
        self._serves(active)
        self._keeping = asyncio.create_task(self._keep(active))

    @property
    def endpoint(self) -> str:
        """Endpoint of the engine, the same after each restart."""
        return self._started.endpoint

    @property
    def pid(self) -> int:
        """Process id of the engine that serves, or served last."""
        return self._started.pid

    @property
    def standby_pid(self) -> int | None:
        """Process id of the standby once it has loaded everything; None before."""
        waiting = [engine.pid for engine in self._processes if engine.stands_by]
        return next((pid for pid in waiting if pid != self.pid), None)

    def progress(self) -> None:
        """Reset the count of restarts in a row, because a request has progressed."""
        self._num_in_a_row = 0

    async def stop(self) -> None:
        """Stop the engine by SIGTERM, then SIGKILL, and remove its directory. Idempotent.

        If the caller is cancelled meanwhile, the processes are killed at once.
        """
        for task in (self._keeping, self._successor):
            # A task of another event loop has ended with that loop.
            if task is not None and task.get_loop() is asyncio.get_running_loop():
                task.cancel()
        active, processes, self._processes = self._active, self._processes, []
        for engine in processes:
            if engine is not active:
                engine.strike()
        try:
            if active is not None:
                await active.stop()
        finally:
            for engine in processes:
                engine.kill()
            if self._directory is not None:
                self._directory.remove()

    def _hear_of_files(self, files: list[StartFile]) -> None:
        self._files = files
        for callback in self._on_files:
            callback(files)

    @property
    def _started(self) -> EngineProcess:
        assert self._active is not None, "a supervisor has an engine once it is started"
        return self._active

    def _launch(self, *flags: str) -> EngineProcess:
        assert self._directory is not None, "it is made before the first engine"
        engine = EngineProcess([*self._flags, *flags], self._directory, self._output_fd)
        self._processes.append(engine)
        return engine

    def _forget(self, engine: EngineProcess) -> None:
        engine.kill()
        self._processes.remove(engine)

    def _serves(self, engine: EngineProcess) -> None:
        self.last_ready_s = time.monotonic()
        self._active = engine
        if self._has_standby:
            self._start_next("--standby")

    def _start_next(self, *flags: str) -> asyncio.Task[EngineProcess]:
        self._successor = asyncio.create_task(self._bring_up(*flags))
        self._successor.add_done_callback(_look_at)
        return self._successor

    async def _bring_up(self, *flags: str) -> EngineProcess:
        """Start an engine and wait until it serves.

        Failures that the last engine's remains may cause are retried.

        Raises:
            NanocoreError: no engine will serve.
        """
        num_failed = 0
        while True:
            # The first restart has no pause; a standby can afford one.
            await asyncio.sleep(_pause_s(self._num_in_a_row - self.is_restarting + num_failed))
            engine = self._launch(*flags)
            try:
                await engine.wait_ready(self._timeout_s)
                return engine
            except EngineStartError as error:
                await engine.stop()
                self._forget(engine)
                code = error.exit_code
                if code is None or not (code < 0 or code in _FAILED_STARTS):
                    raise
                if self.is_restarting:
                    self._count(error)
                elif num_failed == self._max_restarts:
                    raise
                else:
                    num_failed += 1

    async def _keep(self, engine: EngineProcess) -> None:
        try:
            while True:
                engine = await self._replace(engine)
        except NanocoreError as error:
            await self._end(error)
        except Exception as error:  # otherwise clients would wait forever
            logger.exception("internal error: the engine is not supervised any more")
            await self._end(EngineDeadError(f"internal error: {type(error).__name__}: {error}"))

    async def _replace(self, engine: EngineProcess) -> EngineProcess:
        """Wait until the engine dies, and return the next one once it serves.

        Raises:
            NanocoreError: there will be none.
        """
        watch = asyncio.create_task(_strike_if_stopped(engine))
        try:
            await engine.wait_death()
        finally:
            watch.cancel()
        died_s = time.monotonic()
        code = await engine.wait_exit()
        self._forget(engine)
        if died_s - self.last_ready_s >= _SETTLED_S:
            self.progress()
        error = EngineDeadError(f"the engine process exited with code {code}")
        if self._max_restarts == 0 or not (code < 0 or code in _DEATHS):
            raise error
        self._count(error)
        self.last_death_s = died_s
        self.is_restarting = True
        for callback in self._on_death:
            callback(code)
        successor = self._successor
        if successor is None or (successor.done() and successor.exception() is not None):
            successor = self._start_next()
        engine = await successor
        self._successor = None
        self._serves(engine)
        self.is_restarting = False
        for ready in self._on_ready:
            ready()
        return engine

    def _count(self, error: NanocoreError) -> None:
        """Count a restart in a row; raises EngineDeadError after the last one."""
        if self._num_in_a_row == self._max_restarts:
            raise EngineDeadError(
                f"{error}, after {counted(self._max_restarts, 'restart')} in a row"
            )
        self._num_in_a_row += 1
        logger.warning(
            "%s: restarting it (restart %d of at most %d in a row)",
            error,
            self._num_in_a_row,
            self._max_restarts,
        )

    async def _end(self, error: NanocoreError) -> None:
        if self._successor is not None:
            self._successor.cancel()
            await asyncio.wait({self._successor})
        for engine in self._processes[:]:
            self._forget(engine)
        self.ended = error
        self.is_restarting = False
        for callback in self._on_ended:
            callback(error)


async def _strike_if_stopped(engine: EngineProcess) -> None:
    # A suspended process serves no requests, and nothing else would end it.
    num_stopped = 0
    while num_stopped < _MAX_STOPPED_POLLS:
        await asyncio.sleep(_STOPPED_POLL_S)
        num_stopped = num_stopped + 1 if is_stopped(engine.pid) else 0
    logger.warning("the engine process is suspended by a signal: killing it")
    engine.strike()


def _pause_s(num_before: int) -> float:
    return min(_FIRST_PAUSE_S * 2 ** (num_before - 1), _MAX_PAUSE_S) if num_before else 0.0


def _look_at(successor: asyncio.Task[EngineProcess]) -> None:
    # Retrieve the failure, so that asyncio does not report it; it is raised when it is needed.
    if not successor.cancelled() and (error := successor.exception()) is not None:
        logger.warning("the next engine could not start: %s", error)
