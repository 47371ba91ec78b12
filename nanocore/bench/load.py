"""Load generation: requests, their arrival times, and the run that sends them.

Arrival times are a function of the traffic and a seed. Gaps are gamma-distributed; the shape is the
burstiness: 1 is a Poisson process, less is burstier, infinity is even. As in `vllm bench serve`,
gaps are scaled so that they add up to exactly the expected time.

All measured times are `time.perf_counter()` seconds of this process.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import numpy as np

Prompt: TypeAlias = "str | array[int]"
"""A text, or token ids."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """rate: requests per second, infinity for all at once."""

    rate: float = math.inf
    burstiness: float = 1.0


def arrival_times(num_requests: int, traffic: Traffic, seed: int) -> list[float]:
    """Return the arrival of each request in seconds from the start, never decreasing."""
    if math.isinf(traffic.rate):
        return [0.0] * num_requests
    gaps_s = np.full(num_requests, 1.0 / traffic.rate)
    if not math.isinf(traffic.burstiness):
        rng = np.random.default_rng(seed)
        gaps_s = rng.gamma(traffic.burstiness, gaps_s / traffic.burstiness)
    times_s = np.cumsum(gaps_s)
    if times_s[-1] > 0:
        times_s *= num_requests / traffic.rate / times_s[-1]
    times: list[float] = times_s.tolist()
    return times


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """num_prompt_tokens: None without a tokenizer. num_output_tokens: the max_tokens to request.
    arrival_s: of a trace's request, from the trace's start."""

    prompt: Prompt
    num_prompt_tokens: int | None
    num_output_tokens: int
    arrival_s: float | None = None


@dataclass(slots=True)
class Outcome:
    """A measured response; it failed if `error` is set.

    arrival_s: when the request was due. start_s: when it was sent, later than due if it had to wait
    for concurrency. chunk_times_s, chunk_tokens: arrivals of tokens, and how many. end_s: end of
    the response. num_output_tokens: of the whole response. token_ids: decoded after the run.
    """

    num_prompt_tokens: int
    arrival_s: float
    start_s: float
    chunk_times_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    end_s: float = 0.0
    num_output_tokens: int = 0
    text: str = ""
    token_ids: Sequence[int] = ()
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Time to first token; 0 if no token arrived."""
        return self.chunk_times_s[0] - self.start_s if self.chunk_times_s else 0.0

    @property
    def itls_s(self) -> list[float]:
        """Gaps between arrivals of tokens."""
        return [later - earlier for earlier, later in pairwise(self.chunk_times_s)]

    @property
    def latency_s(self) -> float:
        """End-to-end latency; 0 if the response has no end."""
        return max(0.0, self.end_s - self.start_s)

    @property
    def queue_s(self) -> float:
        return self.start_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None if there is only one."""
        if self.num_output_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.num_output_tokens - 1)

    def add_tokens(self, num_tokens: int, now_s: float) -> None:
        self.chunk_times_s.append(now_s)
        self.chunk_tokens.append(num_tokens)
        self.end_s = now_s


Send: TypeAlias = Callable[[BenchRequest, str, float], Awaitable[Outcome]]
"""Sends a request, with its id and arrival, and reads the whole response; errors are in the
outcome."""


@dataclass(frozen=True, slots=True)
class LoadRun:
    """outcomes: in the order of the requests."""

    outcomes: list[Outcome]
    duration_s: float


async def run_load(
    send: Send,
    requests: Sequence[BenchRequest],
    times_s: Sequence[float],
    *,
    max_concurrency: int | None = None,
    request_id_prefix: str = "",
    on_end: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> LoadRun:
    """Send each request at its time, and wait for all; cancelling cancels requests in flight.

    Args:
        times_s: from the start, never decreasing.
        max_concurrency: requests in flight; further ones wait in this process.
        on_end: called at the end of each request.
    """
    slots: AbstractAsyncContextManager[object] = (
        nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    )

    async def one(index: int, request: BenchRequest, arrival_s: float) -> Outcome:
        async with slots:
            outcome = await send(request, f"{request_id_prefix}{index}", arrival_s)
        on_end()
        return outcome

    start_s = clock()
    tasks = []
    async with asyncio.TaskGroup() as group:
        for index, (request, time_s) in enumerate(zip(requests, times_s, strict=True)):
            if (wait_s := start_s + time_s - clock()) > 0:
                await sleep(wait_s)
            tasks.append(group.create_task(one(index, request, start_s + time_s)))
    return LoadRun([task.result() for task in tasks], clock() - start_s)
