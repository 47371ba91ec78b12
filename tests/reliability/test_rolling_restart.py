"""P11 and the headline: engines are replaced one after the other under load, and nobody notices."""

from __future__ import annotations

import asyncio
import os
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from nanocore.client import AsyncEngineClient, SamplingParams
from tests.end_to_end import forked
from tests.reliability.visitor import PATIENCE_S, visitor
from tests.reliability.watched_engine import DEMO_MODEL

NUM_STREAMS = 10
NUM_TOKENS = 100
Answer = tuple[list[int], str, str | None]


class Load:
    """Streams that follow each other, each of which must answer as it did in quiet."""

    def __init__(self, client: AsyncEngineClient) -> None:
        self._client = client
        self._num_answers = [0] * NUM_STREAMS
        self._answered = asyncio.Event()
        self._is_over = False

    async def answer(self, number: int) -> Answer:
        """What one stream says, the letters as they came."""
        temperature = float(number % 2)
        params = SamplingParams(
            temperature=temperature, seed=number, max_tokens=NUM_TOKENS, ignore_eos=True
        )
        text, ids, reason = "", list[int](), None
        async for output in self._client.generate(f"Count from {number} to 90.", params):
            (sample,) = output.outputs
            text += sample.delta
            ids, reason = sample.token_ids, sample.finish_reason
        return ids, text, reason

    async def keep_on(self, number: int, expected: Answer) -> None:
        """One stream after the other, until it is over."""
        while not self._is_over:
            assert await self.answer(number) == expected
            self._num_answers[number] += 1
            self._answered.set()

    async def all_answer_twice(self) -> None:
        """Wait until each stream has ended, and one that began after that, too."""
        wanted = [number + 2 for number in self._num_answers]
        while any(has < wants for has, wants in zip(self._num_answers, wanted, strict=True)):
            self._answered.clear()
            await self._answered.wait()

    def end(self) -> None:
        """Let streams end, and begin no more."""
        self._is_over = True


def start(endpoint: str, folder: Path) -> BaseProcess:
    return forked.start(folder / "log", ("--model", str(DEMO_MODEL), "--listen", endpoint))


def wait_until_it_serves(endpoint: str) -> None:
    with visitor(endpoint) as client:
        client.stats()


async def replace(
    process: BaseProcess, number: signal.Signals, endpoint: str, folder: Path
) -> BaseProcess:
    """End an engine by this signal, and start one in its place."""
    assert process.pid is not None
    os.kill(process.pid, number)
    await asyncio.to_thread(process.join, PATIENCE_S)
    assert process.exitcode == (0 if number == signal.SIGTERM else -number)
    successor = start(endpoint, folder)
    await asyncio.to_thread(wait_until_it_serves, endpoint)
    return successor


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_rolling_restart_of_two_engines_under_load_loses_nothing(
    short_path: Path, number: signal.Signals
) -> None:
    """Whether they drain or are killed."""
    folders = [short_path / name for name in "ab"]
    endpoints = [f"ipc://{folder}/e/engine.sock" for folder in folders]

    async def main() -> None:
        async with AsyncEngineClient.connect(endpoints, timeout_s=PATIENCE_S) as client:
            load = Load(client)
            expected = await asyncio.gather(*map(load.answer, range(NUM_STREAMS)))
            async with asyncio.TaskGroup() as group:
                for i in range(NUM_STREAMS):
                    group.create_task(load.keep_on(i, expected[i]))
                await load.all_answer_twice()
                for i, endpoint in enumerate(endpoints):
                    engines[i] = await replace(engines[i], number, endpoint, folders[i])
                    await load.all_answer_twice()
                load.end()

    for folder in folders:
        folder.mkdir()
    engines = [start(*place) for place in zip(endpoints, folders, strict=True)]
    try:
        for endpoint in endpoints:
            wait_until_it_serves(endpoint)
        asyncio.run(asyncio.wait_for(main(), 2 * PATIENCE_S))
    finally:
        for process in engines:
            process.kill()
