"""Asks what a batch has to ask, so many requests at once, and writes each answer as it comes.

An engine that is full says so, and is asked again when it says; one that is gone is waited for. A
run that ends early, for whatever reason, has written whole lines, and the next one goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from nanocore.cli.batch.in_process import Answer, AsgiApp, ask
from nanocore.cli.batch.lines import BadLine, BatchRequest
from nanocore.cli.batch.plan import Plan
from nanocore.cli.batch.result_lines import of_answer, of_bad_line
from nanocore.cli.batch.results import Results
from nanocore.protocol.errors import EngineDeadError
from nanocore.protocol.messages import Limits

MAX_UNAVAILABLE_S: Final = 30.0
"""That one request waits for an engine to come back, beside what its client waits."""
_FULL: Final = 429
_UNAVAILABLE: Final = 503


class BatchRunner:
    """One run. num_answered, num_failed: lines that it has written, without and with an error.

    pause: waits for so many seconds. on_result: called for each line that was written.
    """

    def __init__(
        self,
        app: AsgiApp,
        plan: Plan,
        results: Results,
        on_result: Callable[[], None],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.num_answered = 0
        self.num_failed = 0
        self._app = app
        self._plan = plan
        self._results = results
        self._on_result = on_result
        self._pause = pause

    async def run(self, max_concurrency: int) -> None:
        """To the end of the input.

        Raises:
            EngineDeadError: the engine is gone. NanocoreError: a result cannot be written.
        """
        slots = asyncio.Semaphore(max_concurrency)
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await slots.acquire()
                    # In a thread: who writes the input may take its time.
                    line = await asyncio.to_thread(self._plan.next)
                    if line is None:
                        break
                    if isinstance(line, BadLine):
                        self._write(of_bad_line(line), True)
                        slots.release()
                    else:
                        task = group.create_task(self._do(line))
                        task.add_done_callback(lambda _: slots.release())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _do(self, request: BatchRequest) -> None:
        self._write(*of_answer(request, await self._answer(request)))

    async def _answer(self, request: BatchRequest) -> Answer:
        waited_s = 0.0
        while True:
            answer = await ask(self._app, request.url, request.body)
            if answer.status not in (_FULL, _UNAVAILABLE):
                return answer
            pause_s = answer.retry_after_s or 1.0
            if answer.status == _UNAVAILABLE:
                waited_s += pause_s
                if waited_s > MAX_UNAVAILABLE_S:
                    raise EngineDeadError(
                        "the engine is gone, or stopping: the same command goes on where this one "
                        "stopped"
                    )
            await self._pause(pause_s)

    def _write(self, line: bytes, failed: bool) -> None:
        self._results.append(line)
        if failed:
            self.num_failed += 1
        else:
            self.num_answered += 1
        self._on_result()


def default_concurrency(limits: Limits) -> int:
    """As many as the engine runs at once, and as many again that wait, if it lets them."""
    waiting = limits.max_num_seqs
    if limits.max_num_queued_reqs is not None:
        waiting = min(waiting, limits.max_num_queued_reqs)
    return limits.max_num_seqs + waiting
