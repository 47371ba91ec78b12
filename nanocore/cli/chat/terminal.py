"""The terminal's keyboard: who gets Ctrl-C, and what becomes of what is typed during an answer."""

from __future__ import annotations

import asyncio
import os
import signal
import termios
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

_ENDING: Final = signal.SIGTERM, signal.SIGHUP


class Interrupts:
    """SIGINT stops what goes on, or ends the command; SIGTERM and SIGHUP end it.

    The signals wake the event loop: none waits for the next key.
    """

    def __init__(self) -> None:
        self._stop: Callable[[], object] | None = None
        self._main: asyncio.Future[Any] | None = None
        self._ended_by = 0

    async def run(self, work: Coroutine[Any, Any, object]) -> int:
        """Do this until it ends, or a signal ends it; returns the exit code."""
        loop = asyncio.get_running_loop()
        self._main = asyncio.ensure_future(work)
        for number in (signal.SIGINT, *_ENDING):
            loop.add_signal_handler(number, self._take, number)
        try:
            await self._main
        except asyncio.CancelledError:
            if not self._ended_by:
                raise
        finally:
            for number in (signal.SIGINT, *_ENDING):
                loop.remove_signal_handler(number)
        return 128 + self._ended_by if self._ended_by else 0

    @contextmanager
    def to(self, stop: Callable[[], object]) -> Iterator[None]:
        """SIGINT calls this meanwhile."""
        before, self._stop = self._stop, stop
        try:
            yield
        finally:
            self._stop = before

    async def stoppable(self, work: Coroutine[Any, Any, object]) -> bool:
        """Do this until it ends, or SIGINT stops it; whether it has ended by itself."""
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


@contextmanager
def quiet_keyboard(fd: int, in_lines: bool) -> Iterator[None]:
    """What is typed meanwhile is not shown: it is read by who reads next. Ctrl-C does its work.

    in_lines: by who reads lines; else by who reads keys.
    """
    try:
        before = termios.tcgetattr(fd)
    except termios.error:  # no terminal
        yield
        return
    quiet = [*before]
    quiet[3] &= ~(termios.ECHO if in_lines else termios.ECHO | termios.ICANON)
    termios.tcsetattr(fd, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        with suppress(termios.error):  # it has hung up
            termios.tcsetattr(fd, termios.TCSANOW, before)


def is_dumb(environment: dict[str, str]) -> bool:
    """Whether the terminal can do no more than show lines."""
    return environment.get("TERM", "").lower() in ("", "dumb", "unknown")


class LinePrompt:
    """Reads lines from a terminal that can do nothing else. See `Prompt`."""

    def __init__(self, fd: int, write: Callable[[str], None], interrupts: Interrupts) -> None:
        self._fd, self._write, self._interrupts = fd, write, interrupts

    async def read(self) -> str:
        """The next line; Ctrl-C begins it anew.

        Raises:
            EOFError: there is none.
        """
        loop = asyncio.get_running_loop()
        self._write("> ")
        line = b""
        while not line.endswith(b"\n"):
            ready: asyncio.Future[None] = loop.create_future()
            loop.add_reader(self._fd, _set, ready)
            try:
                with self._interrupts.to(lambda: self._write("\n> ")):  # the kernel drops the line
                    await ready
            finally:
                loop.remove_reader(self._fd)
            data = os.read(self._fd, 65536)
            if not data:
                self._write("\n")
                raise EOFError
            line += data
        return line.decode(errors="replace").rstrip("\n")

    def above(self, write: Callable[[], None]) -> None:
        """Write something while a line is read."""
        write()


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
