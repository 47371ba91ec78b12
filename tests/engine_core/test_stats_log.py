"""The line of throughput and load: what it says, when it comes, and that rest is silent."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from msgspec.structs import replace

from nanocore.engine_core.io.io_thread import StatsLog, stats_line
from nanocore.protocol.metrics import Stats
from tests.protocol.samples import STATS

REST = replace(
    STATS,
    num_requests_running=0,
    num_requests_waiting=0,
    kv_cache_usage_perc=0.0,
    prompt_tokens=100,
    generation_tokens=50,
)
BUSY = replace(
    REST,
    num_requests_running=16,
    num_requests_waiting=3,
    kv_cache_usage_perc=0.415,
    prefix_cache_hit_rate=0.625,
    prompt_tokens=2148,
    generation_tokens=5170,
)
LINE = (
    "Avg prompt throughput: 204.8 tokens/s, Avg generation throughput: 512.0 tokens/s, "
    "Running: 16 reqs, Waiting: 3 reqs, KV cache usage: 41.5%, Prefix cache hit rate: 62.5%"
)


def test_it_is_in_vllms_words_as_the_document_has_it() -> None:
    assert stats_line(REST, BUSY, 10.0) == LINE
    document = Path(__file__).parents[2] / "docs" / "operations.md"
    assert f") {LINE}\n" in document.read_text("utf-8")


def test_drafts_are_told_if_some_were_computed_in_that_time() -> None:
    before = replace(REST, spec_decode_num_draft_tokens=100, spec_decode_num_accepted_tokens=90)
    now = replace(BUSY, spec_decode_num_draft_tokens=350, spec_decode_num_accepted_tokens=243)
    assert stats_line(before, now, 10.0) == f"{LINE}, Drafts accepted: 61.2%"
    assert stats_line(now, now, 10.0).endswith("hit rate: 62.5%")


class Played:
    """A log whose counters and time a test sets."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self._caplog = caplog
        self.stats = REST
        self.num_reads = 0
        self._log = StatsLog(self._read, 1000.0)

    def lines(self, now_s: float) -> list[str]:
        """Those that a look at this time writes."""
        self._caplog.clear()
        self._log.look(now_s)
        return self._caplog.messages

    def _read(self) -> Stats:
        self.num_reads += 1
        return self.stats


@pytest.fixture
def played(caplog: pytest.LogCaptureFixture) -> Played:
    return Played(caplog)


def test_it_comes_every_ten_seconds_of_work_and_is_of_the_time_that_passed(played: Played) -> None:
    played.stats = BUSY
    assert played.lines(1009.9) == []
    assert played.num_reads == 1  # at the start
    assert played.lines(1010.0) == [LINE]
    played.stats = replace(BUSY, generation_tokens=5170 + 4000)
    assert played.lines(1019.0) == []
    (line,) = played.lines(1030.0)
    assert "Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 200.0 tokens/s" in line


def test_an_engine_that_comes_to_rest_says_so_once(played: Played) -> None:
    assert played.lines(1010.0) == []
    played.stats = replace(BUSY, num_requests_running=0, num_requests_waiting=0)
    assert len(played.lines(1020.0)) == 1  # there was work in between
    (line,) = played.lines(1030.0)
    assert "generation throughput: 0.0 tokens/s, Running: 0 reqs" in line
    assert played.lines(1040.0) == []


@pytest.mark.parametrize("stuck", [{"num_requests_waiting": 1}, {"num_requests_running": 1}])
def test_requests_without_tokens_are_no_rest(played: Played, stuck: dict[str, int]) -> None:
    played.stats = replace(REST, **stuck)  # it is paused, or hangs
    for now_s in (1010.0, 1020.0, 1030.0):
        assert len(played.lines(now_s)) == 1
