"""Requests with a timeout_s: they end when it has passed, and hold nothing any more."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nanocore.client import AsyncEngineClient
from nanocore.protocol.messages import Control, Submit
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.protocol.structured_outputs import StructuredOutputs
from tests.end_to_end.forked import Engine, engine
from tests.end_to_end.raw_requests import ask

PROMPT = np.array([1, 2, 3], "<i4").tobytes()
PAUSE = Control(call_id=1, operation="pause")
SHORT_S = 0.01
NEVER_S = 1e6


@pytest.fixture(scope="module")
def running(tiny_model: Path) -> Iterator[Engine]:
    with engine(tiny_model, "--max-num-seqs", "2") as started:
        yield started


def submit(request_id: str, max_tokens: int, timeout_s: float | None, **sampling: object) -> Submit:
    params = EngineSamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        **sampling,  # type: ignore[arg-type]
    )
    return Submit(
        request_id=request_id, prompt_token_ids=PROMPT, sampling=params, timeout_s=timeout_s
    )


async def wait_until_idle(endpoint: str) -> None:
    """Until nothing runs or waits and every block is free again."""
    async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
        while True:
            stats = await client.stats()
            if stats.num_requests_running == stats.num_requests_waiting == 0:
                assert stats.num_free_blocks == stats.num_blocks
                return


def test_running_and_waiting_requests_end_when_their_time_has_passed(running: Engine) -> None:
    """Those that have longer, or for ever, lose nothing by it."""

    async def main() -> None:
        submits = [submit(f"overdue {i}", 1000, SHORT_S) for i in range(3)]
        submits += [submit("in time", 40, NEVER_S), submit("any time", 40, None)]
        *overdue, in_time, any_time = await ask(running.endpoint, submits)
        for answer in overdue:
            assert answer.why == ("timeout", None)
            assert len(answer.tokens) < 1000
        assert in_time.why == any_time.why == ("length", None)
        assert in_time.tokens == any_time.tokens
        assert len(in_time.tokens) == 40
        await wait_until_idle(running.endpoint)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_pause_stops_no_clock(running: Engine) -> None:
    async def main() -> None:
        wanted = StructuredOutputs(regex="[ab]{9}")
        submits = [
            submit("plain", 9, SHORT_S),
            submit("structured", 9, SHORT_S, structured_outputs=wanted),
        ]
        answers = await ask(running.endpoint, submits, PAUSE)
        assert [answer.why for answer in answers] == [("timeout", None)] * 2
        assert [answer.tokens for answer in answers] == [[], []]
        await wait_until_idle(running.endpoint)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_time_that_is_none_is_refused(running: Engine) -> None:
    async def main() -> None:
        submits = [submit("zero", 9, 0.0), submit("too long", 9, 2e6)]
        for answer in await ask(running.endpoint, submits):
            assert answer.refused is not None
            assert answer.refused.code == "invalid_request"
            assert "timeout_s" in answer.refused.message

    asyncio.run(asyncio.wait_for(main(), 60))
