"""The scheduler's options through real processes: priorities, a bounded queue, salted sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanocore.client import AsyncEngineClient, EngineOverloadedError, SamplingParams
from tests.end_to_end.forked import Engine, engine

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
PROMPT = list(range(1, 41))


@pytest.fixture(scope="module")
def running(tiny_model: Path) -> Iterator[Engine]:
    """One seat, room for three in the queue, and every option that changes who goes when."""
    with engine(
        tiny_model,
        "--scheduling-policy=priority",
        "--max-num-seqs=1",
        "--max-num-queued-reqs=3",
        "--max-num-queued-tokens=200",
        "--long-prefill-token-threshold=16",
        "--watermark=0.01",
        "--target-itl-ms=50",
        "--salt-prefix-cache-by-session",
    ) as started:
        yield started


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


def connect(running: Engine) -> AsyncEngineClient:
    return AsyncEngineClient.connect(running.endpoint, timeout_s=60)


async def wait_for_waiting(client: AsyncEngineClient, count: int) -> None:
    """Until so many requests wait."""
    while (await client.stats()).num_requests_waiting < count:
        pass


def test_the_most_urgent_request_goes_first(running: Engine) -> None:
    async def main() -> None:
        async with connect(running) as client:
            await client.pause()
            ended: list[int] = []

            async def complete(priority: int) -> None:
                await client.complete([priority + 5] * 10, GREEDY, priority=priority)
                ended.append(priority)

            async with asyncio.TaskGroup() as group:
                for priority in (1, 0, -1):
                    group.create_task(complete(priority))
                await wait_for_waiting(client, 3)
                await client.resume()
            assert ended == [-1, 0, 1]

    run(main())


@pytest.mark.parametrize(("num_waiting", "num_tokens"), [(3, 10), (2, 90)])
def test_an_overloaded_engine_says_so_and_when_to_try_again(
    running: Engine, num_waiting: int, num_tokens: int
) -> None:
    async def main() -> None:
        async with connect(running) as client:
            await client.pause()
            prompt = [7] * num_tokens
            async with asyncio.TaskGroup() as group:
                for _ in range(num_waiting):
                    group.create_task(client.complete(prompt, GREEDY))
                await wait_for_waiting(client, num_waiting)
                with pytest.raises(EngineOverloadedError) as caught:
                    await client.complete(prompt, GREEDY)
                assert caught.value.retry_after_s > 0
                await client.resume()
            assert (await client.complete(prompt, GREEDY)).finished

    run(main())


def test_a_session_finds_its_own_prefixes_and_nobody_elses(running: Engine) -> None:
    async def main() -> None:
        async with connect(running) as mine, connect(running) as other:
            first = await mine.complete(PROMPT, GREEDY)
            foreign = await other.complete(PROMPT, GREEDY)
            again = await mine.complete(PROMPT, GREEDY)
            assert (first.num_cached_tokens, foreign.num_cached_tokens) == (0, 0)
            assert again.num_cached_tokens == 32
            assert again.outputs[0].token_ids == foreign.outputs[0].token_ids
            stats = await mine.stats()
            assert 0 < stats.prefix_cache_hit_rate < 1

    run(main())


def test_a_request_can_leave_the_cache_unread(running: Engine) -> None:
    async def main() -> None:
        async with connect(running) as client:
            unread = SamplingParams(
                temperature=0,
                max_tokens=4,
                ignore_eos=True,
                detokenize=False,
                skip_reading_prefix_cache=True,
            )
            outputs = [await client.complete(PROMPT, params) for params in (GREEDY, unread, GREEDY)]
            assert [output.num_cached_tokens for output in outputs] == [0, 0, 32]
            assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1

    run(main())
