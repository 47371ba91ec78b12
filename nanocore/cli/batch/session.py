"""One run of `nanocore batch`: files, engine, requests, progress bar and shutdown.

Requests that a full engine refuses are retried after its Retry-After; if the engine is gone, the
run waits for it. A run that ends early, for any reason, has written whole lines, and the next run
continues.

The first signal aborts running requests, which the next run repeats; the second one exits at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from functools import partial
from typing import BinaryIO, Final

from tqdm import tqdm

from nanocore.cli.batch.calls import Call, CallResponse, ask, relay
from nanocore.cli.batch.flags import SERVER_CONCURRENCY, BatchOptions
from nanocore.cli.batch.pending import BadLine, BatchRequest, PendingLines, ResultIndex, read_lines
from nanocore.cli.batch.results import STANDARD, ResultError, Results, bad_line, response_line
from nanocore.cli.command import INTERRUPTED
from nanocore.cli.engine_choice import engine_client
from nanocore.http.app import App
from nanocore.protocol.errors import ConfigError, EngineDeadError, counted
from nanocore.protocol.messages import Limits

logger = logging.getLogger(__name__)

SOME_FAILED: Final = 1
_COUNTED_BYTES: Final = 2**20
MAX_UNAVAILABLE_S: Final = 30.0
"""Per-request limit for 503 retries, in addition to the client's wait for an engine."""
_FULL: Final = 429
_UNAVAILABLE: Final = 503


def answer_batch(options: BatchOptions) -> int:
    """Process all lines without results; return the exit code.

    Raises:
        NanocoreError: files cannot be used, or the engine did not start or has ended.
    """
    index = ResultIndex()
    with _opened(options.input) as source, closing(Results(options.output, index)) as results:
        if results.is_file(source.fileno()):
            raise ConfigError(f"{options.input}: input and output are the same file")
        pending = PendingLines(read_lines(source, options.app.max_body_bytes), index)
        with tqdm(total=_num_lines(source), unit="request", disable=None) as bar:
            return asyncio.run(_run(options, pending, results, bar))


class _Once(logging.Filter):
    """Drops repeated lines: many requests may fail for the same reason."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        is_new = text not in self._seen
        self._seen.add(text)
        return is_new


async def _run(
    options: BatchOptions, pending: PendingLines, results: Results, bar: tqdm[None]
) -> int:
    logging.getLogger("nanocore.http.http_errors").addFilter(_Once())

    def show() -> None:
        bar.update(pending.num_done + runner.num_answered + runner.num_failed - bar.n)

    runner = BatchRunner(pending, results, show)
    interruption = _Interruption()
    try:
        if await asyncio.to_thread(pending.has_more):
            async with _answering(options) as (call, concurrency):
                await runner.run(call, options.max_concurrency or concurrency)
    except asyncio.CancelledError:
        if not interruption.came:
            raise
        bar.close()
        logger.info("interrupted; run the same command again to continue")
        return INTERRUPTED
    finally:
        bar.close()
    for line in summary(pending, runner):
        logger.info("%s", line)
    return SOME_FAILED if pending.num_failed + runner.num_failed else 0


def summary(pending: PendingLines, runner: BatchRunner) -> list[str]:
    """Return what is said at the end, as lines."""
    num_failed = pending.num_failed + runner.num_failed
    num_answered = pending.num_done - pending.num_failed + runner.num_answered
    earlier = f" ({counted(pending.num_done, 'line')} in earlier runs)" if pending.num_done else ""
    num_lines = counted(num_answered + num_failed, "line")
    said = [f"{num_lines}: {num_answered} succeeded, {num_failed} failed{earlier}"]
    if pending.num_failed:
        said.append("errors of earlier runs are kept: remove their lines to try them again")
    return said


@asynccontextmanager
async def _answering(options: BatchOptions) -> AsyncIterator[tuple[Call, int]]:
    """Yield what answers requests, and how many to send at once."""
    if options.url is not None:
        async with relay(options.url, os.environ.get("OPENAI_API_KEY", "").strip()) as server:
            yield server, SERVER_CONCURRENCY
        return
    app = App(options.app)
    async with engine_client(options.engine) as client:
        app.state.client = client
        yield partial(ask, app), default_concurrency(client.limits)


class _Interruption:
    """Cancels the current task at the first signal, and exits at the second."""

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
        raise ConfigError(f"{path}: {error.strerror}: the requests cannot be read") from None
    with file:
        yield file


def _num_lines(file: BinaryIO) -> int | None:
    """Count the lines; None for a pipe, which cannot be read twice."""
    if not file.seekable():
        return None
    number = 0
    while piece := file.read(_COUNTED_BYTES):
        number += piece.count(b"\n")
    file.seek(0)
    return number


class BatchRunner:
    """Sends the pending requests, many at once, and writes each result as it arrives.

    num_answered, num_failed: lines written so far, without and with an error.

    on_result: called for each line written. pause: sleeps, in seconds.
    """

    def __init__(
        self,
        pending: PendingLines,
        results: Results,
        on_result: Callable[[], None],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.num_answered = 0
        self.num_failed = 0
        self._pending = pending
        self._results = results
        self._on_result = on_result
        self._pause = pause

    async def run(self, call: Call, max_concurrency: int) -> None:
        """Run to the end of the input. call: answers a request.

        Raises:
            EngineDeadError: the engine is gone.
            NanocoreError: a result cannot be written.
        """
        slots = asyncio.Semaphore(max_concurrency)
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await slots.acquire()
                    # In a thread, because the input may be a slow pipe.
                    line = await asyncio.to_thread(self._pending.next)
                    if line is None:
                        break
                    if isinstance(line, BadLine):
                        self._write(*bad_line(line))
                        slots.release()
                    else:
                        task = group.create_task(self._do(call, line))
                        task.add_done_callback(lambda _: slots.release())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _do(self, call: Call, request: BatchRequest) -> None:
        self._write(*response_line(request, await self._answered(call, request)))

    async def _answered(self, call: Call, request: BatchRequest) -> CallResponse:
        waited_s = 0.0
        while True:
            response = await call(request.url, request.body)
            if response.status not in (_FULL, _UNAVAILABLE):
                return response
            pause_s = response.retry_after_s or 1.0
            if response.status == _UNAVAILABLE:
                waited_s += pause_s
                if waited_s > MAX_UNAVAILABLE_S:
                    raise EngineDeadError(
                        "the engine is gone or stopping, or the server is; run the same command "
                        "again to continue"
                    )
            await self._pause(pause_s)

    def _write(self, line: bytes, error: ResultError | None) -> None:
        self._results.append(line)
        if error is None:
            self.num_answered += 1
        else:
            self.num_failed += 1
        self._on_result()


def default_concurrency(limits: Limits) -> int:
    """Return the engine's running requests plus as many waiting ones, within its queue limit."""
    waiting = limits.max_num_seqs
    if limits.max_num_queued_reqs is not None:
        waiting = min(waiting, limits.max_num_queued_reqs)
    return limits.max_num_seqs + waiting
