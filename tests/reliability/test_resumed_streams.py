"""Streams outlive their engine: no token is lost, repeated or different, whatever kind they are."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from types import ModuleType

import pytest

from tests.campaign import in_campaign

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NUM_TOKENS = 200


@pytest.fixture
def resume(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark of 200 kills, of which this is a short form."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("resume")


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forked_launches")
@pytest.mark.parametrize(
    ("num_ranks", "standby", "num_kills"),
    [(1, True, 2), *in_campaign((1, False, 3), (2, False, 2))],
)
def test_streams_of_every_kind_go_on_when_their_engine_is_killed(
    resume: ModuleType, num_ranks: int, standby: bool, num_kills: int
) -> None:
    tally = asyncio.run(resume.measure(None, num_ranks, standby, num_kills, NUM_TOKENS, 0.0))
    assert tally.num_kills == num_kills
    assert tally.faults == {"lost": 0, "repeated": 0, "different": 0}
    assert tally.num_streams.keys() == resume.stream_kinds(NUM_TOKENS).keys()
    assert tally.num_resumes >= num_kills
