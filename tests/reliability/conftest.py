"""One engine for all attacks that an engine survives, and what its bystanders answer in quiet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from nanocore.client import AsyncEngineClient
from tests.reliability.bystanders import Answers, answer_all
from tests.reliability.visitor import PATIENCE_S
from tests.reliability.watched_engine import (
    MAX_NUM_QUEUED_REQS,
    MAX_NUM_SEQS,
    WatchedEngine,
    watched_engine,
)


@pytest.fixture(scope="session")
def shared_engine() -> Iterator[WatchedEngine]:
    """Few places, so that they can be filled."""
    with watched_engine(
        f"--max-num-seqs={MAX_NUM_SEQS}",
        f"--max-num-queued-reqs={MAX_NUM_QUEUED_REQS}",
        "--kv-cache-memory-bytes=67108864",
    ) as running:
        yield running


@pytest.fixture(scope="session")
def quiet(shared_engine: WatchedEngine) -> Answers:
    """The bystanders' answers when nobody else is there; the engine is warm then."""

    async def rounds() -> Answers:
        async with AsyncEngineClient.connect(shared_engine.endpoint, timeout_s=PATIENCE_S) as one:
            answers = await answer_all(one)
            assert await answer_all(one) == answers
            return answers

    answers = asyncio.run(rounds())
    shared_engine.remember()
    return answers


@pytest.fixture
def engine(shared_engine: WatchedEngine, quiet: Answers) -> Iterator[WatchedEngine]:
    """The engine; after the test it must serve, and hold what it held before any."""
    yield shared_engine
    shared_engine.assert_nothing_leaked()
