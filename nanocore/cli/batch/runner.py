"""BatchRunner: sends the pending requests, many at once, and writes each result as it arrives.

Requests that a full engine refuses are retried after its Retry-After; if the engine is gone, the
run waits for it. A run that ends early, for any reason, has written whole lines, and the next run
continues.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from nanocore.cli.batch.calls import AsgiApp, CallResponse, ask
from nanocore.cli.batch.lines import BadLine, BatchRequest
from nanocore.cli.batch.pending import PendingLines
from nanocore.cli.batch.results import ResultError, Results, bad_line, response_line
from nanocore.protocol.errors import EngineDeadError, quoted, shorten
from nanocore.protocol.messages import Limits

MAX_UNAVAILABLE_S: Final = 30.0
"""Per-request limit for 503 retries, in addition to the client's wait for an engine."""
_MAX_KINDS: Final = 1000
"""Kinds of errors that are told apart."""
_FULL: Final = 429
_UNAVAILABLE: Final = 503


class FrequentError(msgspec.Struct):
    """first: the first of these errors. custom_id: its request's, if it has one."""

    first: ResultError
    custom_id: str | None
    count: int = 0

    def __str__(self) -> str:
        where = f"line {self.first.line}"
        if self.custom_id is not None:
            where += f", {quoted(self.custom_id)}"
        times = "once" if self.count == 1 else f"{self.count} times"
        return f"{times}, first {where}: {shorten(self.first.message)}"


class BatchRunner:
    """num_answered, num_failed: lines written so far, without and with an error.

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
        self._errors: dict[str, FrequentError] = {}  # by message, whatever numbers it has
        self._pending = pending
        self._results = results
        self._on_result = on_result
        self._pause = pause

    async def run(self, app: AsgiApp, max_concurrency: int) -> None:
        """Run to the end of the input. app: answers the requests.

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
                        self._write(line.custom_id, *bad_line(line))
                        slots.release()
                    else:
                        task = group.create_task(self._do(app, line))
                        task.add_done_callback(lambda _: slots.release())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _do(self, app: AsgiApp, request: BatchRequest) -> None:
        response = await self._call(app, request)
        self._write(request.custom_id, *response_line(request, response))

    async def _call(self, app: AsgiApp, request: BatchRequest) -> CallResponse:
        waited_s = 0.0
        while True:
            response = await ask(app, request.url, request.body)
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

    def most_frequent_error(self) -> FrequentError | None:
        return max(self._errors.values(), key=lambda one: one.count, default=None)

    def _write(self, custom_id: str | None, line: bytes, error: ResultError | None) -> None:
        self._results.append(line)
        if error is None:
            self.num_answered += 1
        else:
            self.num_failed += 1
            self._count(error, custom_id)
        self._on_result()

    def _count(self, error: ResultError, custom_id: str | None) -> None:
        kind = re.sub("[0-9]+", "0", error.message)
        if kind in self._errors or len(self._errors) < _MAX_KINDS:
            self._errors.setdefault(kind, FrequentError(error, custom_id)).count += 1


def default_concurrency(limits: Limits) -> int:
    """Return the engine's running requests plus as many waiting ones, within its queue limit."""
    waiting = limits.max_num_seqs
    if limits.max_num_queued_reqs is not None:
        waiting = min(waiting, limits.max_num_queued_reqs)
    return limits.max_num_seqs + waiting
