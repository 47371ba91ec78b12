"""One run of `nanocore batch`: its files, its engine, its progress and its end.

A first signal ends it in order: requests that run are aborted, and the next run asks for them. A
second one leaves at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import BinaryIO, Final

from tqdm import tqdm

from nanocore.cli.batch.flags import BatchOptions
from nanocore.cli.batch.ledger import Ledger
from nanocore.cli.batch.lines import read_lines
from nanocore.cli.batch.plan import Plan
from nanocore.cli.batch.results import STANDARD, Results
from nanocore.cli.batch.runner import BatchRunner, default_concurrency
from nanocore.cli.command import INTERRUPTED
from nanocore.cli.engine_client import engine_client
from nanocore.http.app import App
from nanocore.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

SOME_FAILED: Final = 1
_COUNTED_BYTES: Final = 2**20


def answer_batch(options: BatchOptions) -> int:
    """All lines that have no results yet; the exit code.

    Raises:
        NanocoreError: files that cannot be used, an engine that does not start, or ends.
    """
    with (
        _opened(options.input) as source,
        closing(Ledger()) as ledger,
        closing(Results(options.output, ledger, options.retry_errors)) as results,
    ):
        if results.is_file(source.fileno()):
            raise ConfigError(f"{options.input}: results go to another file than the requests")
        plan = Plan(read_lines(source, options.app.max_body_bytes), ledger)
        with tqdm(total=_num_lines(source), unit="request", disable=None) as bar:
            return asyncio.run(_answer(options, plan, results, bar))


class _Once(logging.Filter):
    """Lets each line pass once: of many requests that fail for one reason, one tells it."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is new."""
        text = record.getMessage()
        is_new = text not in self._seen
        self._seen.add(text)
        return is_new


async def _answer(options: BatchOptions, plan: Plan, results: Results, bar: tqdm[None]) -> int:
    logging.getLogger("nanocore.http.http_errors").addFilter(_Once())
    app = App(options.app)

    def show() -> None:
        bar.update(plan.num_done + runner.num_answered + runner.num_failed - bar.n)

    runner = BatchRunner(app, plan, results, show)
    interruption = _Interruption()
    try:
        if await asyncio.to_thread(plan.has_more):
            async with engine_client(options.engine) as client:
                app.state.client = client
                await runner.run(options.max_concurrency or default_concurrency(client.limits))
    except asyncio.CancelledError:
        if not interruption.came:
            raise
        bar.close()
        logger.info("interrupted: the same command goes on where this one stopped")
        return INTERRUPTED
    finally:
        bar.close()
    num_failed = plan.num_failed + runner.num_failed
    num_answered = plan.num_done - plan.num_failed + runner.num_answered
    logger.info(
        "%d lines: %d answered, %d with an error, %d of them by earlier runs",
        num_answered + num_failed, num_answered, num_failed, plan.num_done,
    )  # fmt: skip
    return SOME_FAILED if num_failed else 0


class _Interruption:
    """Cancels the task that made it at the first signal, and ends the process at the second."""

    def __init__(self) -> None:
        self.came = False
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)

    def _interrupt(self) -> None:
        if self.came:
            os._exit(INTERRUPTED)
        self.came = True
        assert self._task is not None, "a coroutine made it"
        self._task.cancel()


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    if path == STANDARD:
        yield sys.stdin.buffer
        return
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below
        file.peek(1)  # a folder can be opened
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: requests are read from there") from None
    with file:
        yield file


def _num_lines(file: BinaryIO) -> int | None:
    """How many there are, if it can be read twice."""
    if not file.seekable():
        return None
    number = 0
    while piece := file.read(_COUNTED_BYTES):
        number += piece.count(b"\n")
    file.seek(0)
    return number
