"""Requests of `LLM.add_request` and `LLM.step`: each is a task that reads `generate`.

A task offers one output and continues once a step has taken it; the stream merges what arrives
meanwhile. Belongs to the event loop of the LLM's thread.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Final, TypeVar

import msgspec

from nanocore.client.async_client import AsyncEngineClient
from nanocore.client.requests.request_outputs import RequestOutput
from nanocore.client.requests.submission import Prompt
from nanocore.protocol.errors import EngineOverloadedError, NanocoreError
from nanocore.protocol.sampling import SamplingParams

Result = TypeVar("Result")
QUEUE_FACTOR: Final = 4
"""Requests in flight per engine row: enough to keep it full, few enough to bound its queue."""


class _Request(msgspec.Struct, eq=False):
    """One request. news: output that no step has taken yet. taken: set by the step that takes
    it."""

    task: asyncio.Task[None] | None = None
    news: RequestOutput | Exception | None = None
    taken: asyncio.Event = msgspec.field(default_factory=asyncio.Event)


class StepwiseRequests:
    """Open requests of one client, in the order in which they were added."""

    def __init__(self, client: AsyncEngineClient) -> None:
        self._client = client
        self._requests: dict[str, _Request] = {}
        self._ids = itertools.count()
        self._news = asyncio.Event()
        self._in_flight: asyncio.Semaphore | None = None

    @property
    def are_unfinished(self) -> bool:
        """Whether a step has anything to report yet."""
        return bool(self._requests)

    async def add(self, prompt: Prompt, params: SamplingParams | None) -> str:
        """Begin a request; returns its id."""
        if self._in_flight is None:
            self._in_flight = asyncio.Semaphore(QUEUE_FACTOR * self._client.limits.max_num_seqs)
        request_id, request = str(next(self._ids)), _Request()
        self._requests[request_id] = request
        reading = partial(self._read, request, prompt, params, request_id)
        request.task = asyncio.create_task(self._run(request, reading, self._in_flight))
        return request_id

    async def step(self) -> list[RequestOutput]:
        """Wait for news; return those of each request, in order. See `LLM.step`."""
        while self._requests:
            if outputs := self._take():
                return outputs
            self._news.clear()
            await self._news.wait()
        return []

    async def abort(self, request_id: str) -> None:
        """End a request and forget it; unknown ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._news.set()  # a step of another thread may wait for it
            await _end([request])

    async def close(self) -> None:
        """Abort all."""
        requests, self._requests = self._requests, {}
        await _end([*requests.values()])

    def _take(self) -> list[RequestOutput]:
        """Return outputs, or raise one request's error if there are none: no output is lost."""
        outputs = []
        for request_id, request in [*self._requests.items()]:
            news = request.news
            if isinstance(news, RequestOutput):
                outputs.append(news)
                request.news = None
                request.taken.set()
                if news.finished:
                    del self._requests[request_id]
        if outputs:
            return outputs
        for request_id, request in self._requests.items():
            if isinstance(request.news, Exception):
                del self._requests[request_id]
                error = request.news
                if isinstance(error, NanocoreError):
                    error.request_id = request_id
                raise error
        return []

    async def _run(
        self,
        request: _Request,
        reading: Callable[[], Awaitable[None]],
        in_flight: asyncio.Semaphore,
    ) -> None:
        try:
            async with in_flight:
                await accepted(reading)
        except Exception as error:
            self._hand_over(request, error)

    async def _read(
        self, request: _Request, prompt: Prompt, params: SamplingParams | None, request_id: str
    ) -> None:
        async with aclosing(self._client.generate(prompt, params, request_id)) as outputs:
            async for output in outputs:
                self._hand_over(request, output)
                if not output.finished:
                    request.taken.clear()
                    await request.taken.wait()

    def _hand_over(self, request: _Request, news: RequestOutput | Exception) -> None:
        request.news = news
        self._news.set()


async def accepted(call: Callable[[], Awaitable[Result]]) -> Result:
    """Call until the engine is not overloaded any more, and return the result."""
    while True:
        try:
            return await call()
        except EngineOverloadedError as busy:
            await asyncio.sleep(busy.retry_after_s)


async def _end(requests: list[_Request]) -> None:
    tasks = [request.task for request in requests if request.task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
