"""What the step trace tells of requests: arrivals, first tokens, who waits for what, whose hits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanocore.engine_core.log.trace import StepTrace
from nanocore.engine_core.mailbox import AbortRequests, AddRequest
from nanocore.engine_core.scheduling.outputs import ClientOutput
from nanocore.tracing.explanation import read_runs
from nanocore.tracing.reader import TraceReader
from nanocore.tracing.timeline import PrefillChunk
from tests.engine_core.core_under_test import CoreUnderTest
from tests.fakes import make_request, next_token


class TracedCore(CoreUnderTest):
    """A core with a trace; whatever it sends is said to be sent at once."""

    def __init__(self, path: Path | None, **settings: Any) -> None:
        self._path = path
        self.trace = None if path is None else StepTrace(str(path))
        super().__init__(self.trace, **settings)

    def step(self, *events: Any) -> dict[str, Any]:
        """Let these events arrive and run one step; its line."""
        for event in events:
            self.inbox.put(event)
        self.core.drain_inbox(wait=False)
        self.core.step()
        for event in self.outbox.drain():
            if self.trace and isinstance(event, ClientOutput):
                self.trace.sent(event)
        if self._path is None:
            return {}
        line: dict[str, Any] = json.loads(self._path.read_text().splitlines()[-1])
        return line


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def add(handle: int, num_tokens: int, max_tokens: int = 4, **settings: Any) -> AddRequest:
    """A prompt of its own."""
    prompt = [(handle * 7 + i) % 50 for i in range(num_tokens)]
    return AddRequest(make_request(handle, prompt, max_tokens, **settings))


def test_an_arrival_is_told_in_the_next_line_and_the_first_token_where_it_is_sampled(
    path: Path,
) -> None:
    core = TracedCore(path, max_num_batched_tokens=8)
    added = add(1, 12)
    first = core.step(added)
    (arrival,) = first["arrived"]
    assert {key: arrival[key] for key in ("id", "session", "priority", "prompt_tokens")} == {
        "id": "r1", "session": 1, "priority": 0, "prompt_tokens": 12,
    }  # fmt: skip
    assert arrival["received_s"] <= arrival["arrived_s"] <= first["t_s"]
    assert (first["first"], first["sent"]) == ([], {})
    second = core.step()
    assert (second["arrived"], second["first"], second["sent"]) == ([], ["r1"], {})
    third = core.step()
    end_s = second["t_s"] + second["duration_ms"] / 1e3
    assert third["first"] == []
    assert end_s <= third["sent"]["r1"] <= third["t_s"] + 1e-6
    assert core.step()["sent"] == {}


def test_a_request_that_ends_before_its_first_token_leaves_nothing_behind(path: Path) -> None:
    core = TracedCore(path, max_num_batched_tokens=8)
    core.step(add(1, 20), add(2, 20))
    core.step(AbortRequests([1, 2]), add(3, 4, 1))
    core.step(add(4, 4, 1))
    assert core.trace is not None
    assert core.trace._started.keys() == {4}


def test_samples_name_the_one_that_computes_their_prompt(path: Path) -> None:
    line = TracedCore(path).step(add(1, 12, n=3))
    leaders = {one["id"]: one.get("leader") for one in line["arrived"]}
    assert leaders == {"r1": None, "r1#1": "r1", "r1#2": "r1"}


@pytest.mark.parametrize(
    ("settings", "by"),
    [
        ({"max_num_seqs": 1}, "rows"),
        ({"max_num_batched_tokens": 12}, "budget"),
        ({"num_blocks": 5}, "kv_blocks"),
    ],
)
def test_the_first_in_line_is_told_with_what_it_lacks(
    path: Path, settings: dict[str, int], by: str
) -> None:
    core = TracedCore(path, **settings)
    line = core.step(add(1, 12), add(2, 12), add(3, 12))
    assert line["new"] == ["r1"]
    assert line["blocked"] == {"id": "r2", "by": by}


def test_who_waits_for_another_stages_rows_does_not_lack_one(path: Path) -> None:
    line = TracedCore(path, num_groups=2).step(add(1, 4), add(2, 4), add(3, 4))
    assert line["new"] == ["r1", "r2"]
    assert line["blocked"] == {"id": "r3", "by": "stage"}


def test_nobody_is_blocked_when_nobody_waits(path: Path) -> None:
    assert TracedCore(path).step(add(1, 4), add(2, 4))["blocked"] is None


def test_who_needed_blocks_is_named_as_the_cause_of_a_preemption(path: Path) -> None:
    core = TracedCore(path, num_blocks=5, enable_prefix_caching=False)
    lines = [core.step(add(1, 7, 9)), core.step(add(2, 9, 9))]
    while not lines[-1]["preempted"]:
        lines.append(core.step())
    assert lines[-1]["preempted_by"] == {"r2": "r1"}
    assert lines[-1]["blocked"] == {"id": "r2", "by": "kv_blocks"}
    assert not any(line["preempted_by"] for line in lines[:-1])


def test_who_is_more_urgent_is_named_as_the_cause_of_a_preemption(path: Path) -> None:
    core = TracedCore(path, max_num_seqs=1, policy="priority")
    core.step(add(1, 8, priority=3))
    line = core.step(add(2, 8, priority=1))
    assert (line["new"], line["preempted_by"]) == (["r2"], {"r1": "r2"})
    assert line["arrived"][0]["priority"] == 1
    assert line["blocked"] == {"id": "r1", "by": "rows"}


def drafting(path: Path, **settings: Any) -> TracedCore:
    """A core whose steps take no time, so that every draft is worth it."""
    return TracedCore(path, num_speculative_tokens=3, clock=lambda: 0.0, **settings)


def test_a_step_with_drafts_tells_how_many_were_right(path: Path) -> None:
    core = drafting(path)
    core.executor.draft = lambda context: next_token(context) + (len(context) == 8)
    assert "accepted" not in core.step(add(1, 5, 7), add(2, 9, 7))
    line = core.step()
    assert line["scheduled"] == {"r1": 4, "r2": 4}
    assert line["accepted"] == {"r1": 2, "r2": 3}
    line = core.step()
    assert line["finished"] == ["r1", "r2"]
    assert line["scheduled"] == {"r1": 3, "r2": 2}
    assert line["accepted"] == {"r1": 2, "r2": 1}


def test_drafts_of_a_request_that_ended_before_the_result_are_not_told(path: Path) -> None:
    core = drafting(path)
    core.executor.draft = next_token
    core.step(add(1, 5, 9), add(2, 9, 9))
    core.during_step = [AbortRequests([1])]
    assert core.step()["accepted"] == {"r2": 3}
    core.during_step = [AbortRequests([2])]
    assert core.step()["accepted"] == {}


def test_a_timeline_has_the_engines_counts_of_drafts_and_of_computed_tokens(path: Path) -> None:
    core = drafting(path, num_blocks=12, enable_prefix_caching=False)
    core.finish(*(add(handle, 4 + handle, 20) for handle in range(1, 7)))
    counters = core.scheduler.draft_counters
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
    (run,) = read_runs(TraceReader(str(path)))
    timelines = run.timelines
    assert sum(one.num_draft_tokens for one in timelines) == counters.num_draft_tokens
    assert sum(one.num_accepted_tokens for one in timelines) == counters.num_accepted_tokens
    assert [one.num_computed for one in timelines] == [4 + i + 20 - 1 for i in range(1, 7)]
    preempted = [one for one in timelines if one.preemptions]
    assert preempted
    for one in preempted:
        num_chunks = sum(isinstance(work, PrefillChunk) for work in one.work)
        assert num_chunks == 1 + len(one.preemptions), "what is decoded again is no prompt"


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_trace_changes_nobodys_turn(path: Path, policy: str) -> None:
    """It looks who is first in line, after each step; plans are those without one."""

    def plans(trace: Path | None) -> list[list[str]]:
        core = TracedCore(trace, max_num_seqs=2, max_num_batched_tokens=16, policy=policy)
        found = []
        for i in range(60):
            events = [] if i % 3 else [add(2 * i + 1, 9, 3, client=1 + i % 4, priority=i % 2)]
            events += [add(2 * i + 2, 5 + i % 7, 2, client=5 + i // 20)]
            core.step(*events)
            running = list(core.scheduler.running)
            found.append([request.request_id for request in running])
        return found

    assert plans(path) == plans(None)
