"""Interrupts: SIGINT stops a command's current work; SIGTERM and SIGHUP end the command."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Signal handling for one event loop.

    The signals wake the event loop. asyncio's own handling of SIGINT misses one that comes just
    before the loop goes to sleep.
    """

    def __init__(self) -> None:
        self._stop: Callable[[], object] | None = None
        self._main: asyncio.Future[Any] | None = None
        self._ended_by = 0

    async def run(self, work: Coroutine[Any, Any, object]) -> int:
        """Run this until it ends or a signal ends it; return the exit code."""
        loop = asyncio.get_running_loop()
        self._main = asyncio.ensure_future(work)
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._take, number)
        try:
            await self._main
        except asyncio.CancelledError:
            if not self._ended_by:
                raise
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
        return 128 + self._ended_by if self._ended_by else 0

    @contextmanager
    def to(self, stop: Callable[[], object]) -> Iterator[None]:
        """Let SIGINT call `stop` inside this block, instead of ending the command."""
        before, self._stop = self._stop, stop
        try:
            yield
        finally:
            self._stop = before

    async def stoppable(self, work: Coroutine[Any, Any, object]) -> bool:
        """Run this until it ends or SIGINT stops it; return whether it ended by itself."""
        task = asyncio.ensure_future(work)
        was_stopped = False

        def stop() -> None:
            nonlocal was_stopped
            was_stopped = True
            task.cancel()

        with self.to(stop):
            try:
                await task
            except asyncio.CancelledError:
                if not was_stopped or self._ended_by:
                    raise
                return False
        return True

    def _take(self, number: int) -> None:
        if number == signal.SIGINT and self._stop is not None:
            self._stop()
            return
        self._ended_by = number
        assert self._main is not None, "it runs"
        self._main.cancel()
