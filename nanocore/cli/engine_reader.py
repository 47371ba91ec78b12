"""Commands that only look at an engine that runs: which one, and what it tells of itself."""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn

from nanocore.cli.flag_types import seconds
from nanocore.client import AsyncEngineClient
from nanocore.protocol.errors import ConfigError, NanocoreError, StartError
from nanocore.system import standard_streams

JOIN_TIMEOUT_S = 10.0
_EXIT_CODES: Final = """\
exit codes: 0 done, 2 usage or configuration, 5 address in use, 70 no engine answers, or internal
error, 130 interrupted"""
_SIGNALS: Final = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


class ReaderParser(argparse.ArgumentParser):
    """Says what is wrong in one line. Has the flags that name an engine."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, epilog=_EXIT_CODES, allow_abbrev=False)
        self.add_argument("--endpoint", metavar="ENDPOINT",
            help="of the engine, ipc:// or tcp:// (default: this user's own)")  # fmt: skip
        self.add_argument("--curve-dir", metavar="DIR", help="keys of nanocore-keygen, for tcp://")
        self.add_argument("--timeout", type=seconds, default=JOIN_TIMEOUT_S, metavar="S",
            help="seconds that it may take to answer (default: %(default)g)")  # fmt: skip

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(f"{message} ({self.prog} --help lists the flags)")


def join(given: argparse.Namespace, resume: bool = True) -> AsyncEngineClient:
    """A client of the engine that the flags name; not yet connected."""
    return AsyncEngineClient.connect(
        given.endpoint, timeout_s=given.timeout, curve_dir=given.curve_dir, resume=resume
    )


async def run_until_signal(work: Coroutine[Any, Any, object]) -> int:
    """Do this until it ends or SIGINT, SIGTERM or SIGHUP cancels it; returns the exit code.

    asyncio's own way with SIGINT misses one that comes just before the loop goes to sleep: here the
    signal itself wakes it.
    """
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    seen: list[int] = []

    def stop(number: int) -> None:
        seen.append(number)
        task.cancel()

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        await task
    except asyncio.CancelledError:
        if not seen:
            raise
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
    return 128 + seen[0] if seen else 0


def report_errors(name: str, command: Callable[[], int]) -> int:
    """Run a command; its exit code, or that of the error that is told in one line on stderr."""
    standard_streams.open_missing()
    try:
        return command()
    except KeyboardInterrupt:
        return 130
    except NanocoreError as error:
        text = str(error)
        for argument, flag in (("timeout_s", "--timeout"), ("curve_dir", "--curve-dir")):
            text = re.sub(rf"\b{argument}\b", flag, text)
        standard_streams.complain(f"{name}: {text}")
        return error.exit_code if isinstance(error, StartError) else StartError.exit_code
    finally:
        standard_streams.flush_or_drop()
