"""Sends requests when they are due and waits for all of them: a run.

A failed request is an outcome like any other. Cancelling a run cancels what is in flight, and each
target then ends its requests in order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from nanocore.bench.outcome import BenchRequest, Outcome

Sleep = Callable[[float], Awaitable[object]]


class Target(Protocol):
    """What is measured."""

    async def send(self, request: BenchRequest, request_id: str, arrival_s: float) -> Outcome:
        """Send a request and see its answer through; what fails is in the outcome's `error`."""


@dataclass(frozen=True, slots=True)
class Run:
    """outcomes: in the order of the requests."""

    outcomes: list[Outcome]
    duration_s: float


async def run_load(
    target: Target,
    requests: Sequence[BenchRequest],
    times_s: Sequence[float],
    *,
    max_concurrency: int | None = None,
    request_id_prefix: str = "",
    on_end: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Sleep = asyncio.sleep,
) -> Run:
    """Let each request arrive at its time.

    Args:
        times_s: never decreasing, since the beginning.
        max_concurrency: requests in flight; others wait for their turn on our side.
        on_end: called at the end of each request.
        clock, sleep: of perf_counter seconds.
    """
    turns: AbstractAsyncContextManager[object] = (
        nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    )

    async def one(index: int, request: BenchRequest, arrival_s: float) -> Outcome:
        async with turns:
            outcome = await target.send(request, f"{request_id_prefix}{index}", arrival_s)
        on_end()
        return outcome

    start_s = clock()
    tasks = []
    async with asyncio.TaskGroup() as group:
        for index, (request, time_s) in enumerate(zip(requests, times_s, strict=True)):
            if (wait_s := start_s + time_s - clock()) > 0:
                await sleep(wait_s)
            tasks.append(group.create_task(one(index, request, start_s + time_s)))
    return Run([task.result() for task in tasks], clock() - start_s)
