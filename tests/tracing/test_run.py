"""A trace as timelines of requests: what each waited for, and what its first token took."""

from __future__ import annotations

import random
from typing import Any

import pytest

from nanocore.tracing import timeline as run_module
from nanocore.tracing.explanation import PARTS, REASONS, ttft_parts, waits
from nanocore.tracing.timeline import DecodeSpan, Preemption, PrefillChunk, RunTimeline
from tests.tracing.trace_lines import arrival, blocked, line, run_of


def at(step: int) -> float:
    """When a step of `line` begins, and the one before it ends."""
    return pytest.approx(step / 100)  # type: ignore[no-any-return]


def two_chunks_and_decodes(num_decodes: int) -> list[dict[str, Any]]:
    """A prompt of 10 tokens in two chunks, then decodes."""
    first = line(1, {"a": 6}, {"a": 0}, new=["a"], arrived=[arrival("a", 10, 0.005, 0.008)])
    second = line(2, {"a": 4}, {"a": 6}, first=["a"])
    decodes = [line(3 + i, {"a": 1}, {"a": 10 + i}) for i in range(num_decodes)]
    decodes[0]["sent"] = {"a": 0.0302}
    decodes[-1]["finished"] = ["a"]
    return [first, second, *decodes]


def test_chunks_and_decodes_of_one_request() -> None:
    (timeline,) = run_of(*two_chunks_and_decodes(5)).timelines
    assert timeline.work == [
        PrefillChunk(at(1), at(2), 6, 0),
        PrefillChunk(at(2), at(3), 4, 6),
        DecodeSpan(at(3), at(8), 5, 5),
    ]
    assert (timeline.admitted_s, timeline.first_s, timeline.ended_s) == (at(1), at(3), at(8))
    assert timeline.sent_s == 0.0302
    assert timeline.ttft_s == pytest.approx(0.0302 - 0.005)
    assert (timeline.cached_tokens, timeline.preemptions, timeline.is_shared) == (0, [], False)


def test_decodes_go_on_past_steps_without_them_and_drafts_are_tokens() -> None:
    steps = two_chunks_and_decodes(4)
    steps[4]["scheduled"] = {}
    (timeline,) = run_of(*steps).timelines
    assert timeline.work[2:] == [DecodeSpan(at(3), at(7), 3, 3)]

    steps = two_chunks_and_decodes(3)
    steps[3]["scheduled"] = {"a": 4}
    (timeline,) = run_of(*steps).timelines
    assert timeline.work[2:] == [DecodeSpan(at(3), at(6), 3, 6)]


def test_rejected_drafts_are_not_computed_tokens() -> None:
    steps = two_chunks_and_decodes(3)
    for i, right in enumerate([2, 0, 3]):
        steps[2 + i] |= {"scheduled": {"a": 4}, "accepted": {"a": right}}
    (timeline,) = run_of(*steps).timelines
    assert timeline.work[2:] == [DecodeSpan(at(3), at(6), 3, 3 + 5)]
    assert (timeline.num_draft_tokens, timeline.num_accepted_tokens) == (9, 5)
    assert timeline.num_computed == 10 + 8

    steps[4]["accepted"] = {}
    (timeline,) = run_of(*steps).timelines
    assert (timeline.num_draft_tokens, timeline.num_accepted_tokens) == (6, 2)


def test_a_preempted_request_is_computed_again_up_to_where_it_was() -> None:
    steps = two_chunks_and_decodes(3)
    steps[4] |= {"scheduled": {"b": 1}, "finished": [], "preempted": ["a"]}
    steps[4]["preempted_by"] = {"a": "b"}
    steps.append(line(6, {"a": 8}, {"a": 4}, resumed=["a"], cached={"a": 4}))
    steps += [line(7 + i, {"a": 1}, {"a": 12 + i}) for i in range(2)]
    run = run_of(*steps)
    (timeline,) = run.timelines_of("a")
    assert timeline.preemptions == [Preemption(at(5), "b", at(6))]
    assert timeline.work[2:] == [
        DecodeSpan(at(3), at(5), 2, 2),
        PrefillChunk(at(6), at(7), 8, 4),
        DecodeSpan(at(7), at(9), 2, 2),
    ]
    assert timeline.cached_tokens == 0, "that was of its first admission"
    assert timeline.ended_s is None


def test_an_id_that_is_used_again_even_in_one_step_is_another_life() -> None:
    steps = two_chunks_and_decodes(2)
    again = line(5, {"a": 3}, new=["a"], arrived=[arrival("a", 3, 0.045, 0.046)], first=["a"])
    again |= {"finished": ["a"]}
    run = run_of(*steps, again, line(6, sent={"a": 0.0602}))
    before, after = run.timelines_of("a")
    assert (before.ended_s, after.ended_s) == (at(5), at(6))
    assert (before.sent_s, after.sent_s) == (0.0302, 0.0602)
    assert [before.is_shared, after.is_shared] == [False, False]

    steps = two_chunks_and_decodes(2)
    steps[3] |= {"arrived": [arrival("a", 3, 0.045, 0.046)]}
    steps.append(line(5, {"a": 3}, new=["a"], first=["a"]))
    before, after = run_of(*steps).timelines_of("a")
    assert (before.ended_s, after.ended_s, after.is_shared) == (at(5), None, False)


def test_an_id_of_two_sessions_at_once_is_said_to_be_shared() -> None:
    steps = two_chunks_and_decodes(3)
    steps[2]["arrived"] = [arrival("a", 3, 0.025, 0.026, session=2)]
    assert [timeline.is_shared for timeline in run_of(*steps).timelines] == [False, True]


def test_a_first_token_that_is_sent_before_its_line_is_written_is_of_that_line() -> None:
    steps = two_chunks_and_decodes(1)
    steps[2]["sent"] = {}
    steps[1]["sent"] = {"a": 0.0299}
    (timeline,) = run_of(*steps).timelines
    assert timeline.sent_s == 0.0299


def test_a_trace_cut_at_the_beginning_tells_lives_without_arrivals() -> None:
    run = run_of(*(line(7 + i, {"a": 1, "b": 1}, {"a": 5 + i, "b": 9 + i}) for i in range(3)))
    assert [(timeline.id, timeline.work) for timeline in run.timelines] == [
        (name, [DecodeSpan(at(7), at(10), 3, 3)]) for name in "ab"
    ]


def test_a_request_that_is_aborted_before_it_ran_ends() -> None:
    (timeline,) = run_of(line(1, arrived=[arrival("a", 9, 0.001, 0.002)], finished=["a"])).timelines
    assert (timeline.admitted_s, timeline.ended_s, timeline.ttft_s) == (None, at(2), None)


def test_steps_that_repeat_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    real = run_module.counts
    monkeypatch.setattr(run_module, "counts", lambda raw: decoded.append(raw) or real(raw))
    (timeline,) = run_of(*two_chunks_and_decodes(1000)).timelines
    assert timeline.work[2] == DecodeSpan(at(3), at(1003), 1000, 1000)
    assert len(decoded) == 5, "two chunks, with what was computed before, and one decode"


def looked_into(steps: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """(decode steps, decoded tokens) of each request, counted one by one."""
    found = {}
    for step in steps:
        for name, count in step["scheduled"].items():
            before = found.get(name, (0, 0))
            found[name] = before[0] + 1, before[1] + count
    return found


@pytest.mark.parametrize("seed", range(5))
def test_counting_by_differences_is_counting(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"r{i}" for i in range(6)]
    steps: list[dict[str, Any]] = [line(1, dict.fromkeys(names, 1))]
    for i in range(2, 200):
        scheduled = dict(steps[-1]["scheduled"])
        if rng.random() < 0.4:
            name = rng.choice(names)
            if scheduled.pop(name, None) is None:
                scheduled[name] = rng.choice([1, 1, 3])
        steps.append(line(i, scheduled))
    counted = {
        timeline.id: (
            sum(one.num_steps for one in timeline.work if isinstance(one, DecodeSpan)),
            sum(one.num_tokens for one in timeline.work),
        )
        for timeline in run_of(*steps).timelines
    }
    assert counted == looked_into(steps)


def test_a_run_knows_what_its_last_step_computed() -> None:
    run = RunTimeline(1)
    assert (run.num_rows, run.num_tokens) == (0, 0)
    run = run_of(line(1, {"a": 6, "b": 1}), line(2, {"a": 6, "b": 1}))
    assert (run.num_rows, run.num_tokens) == (2, 7)


def parts(*steps: dict[str, Any]) -> dict[str, float]:
    """In ms, of request a; that they sum to the whole is checked here for all."""
    (timeline,) = run_of(*steps).timelines_of("a")
    found = ttft_parts(timeline)
    assert timeline.ttft_s is not None
    assert sum(part.ms for part in found) == pytest.approx(timeline.ttft_s * 1e3)
    assert sum(part.share for part in found) == pytest.approx(1.0)
    assert [part.name for part in found] == [name for name in PARTS if name in dict(pairs(found))]
    return {name: pytest.approx(ms) for name, ms in pairs(found)}


def pairs(found: list[Any]) -> list[tuple[str, float]]:
    return [(part.name, part.ms) for part in found]


CAME = arrival("a", 10, 0.003, 0.007)


def test_the_parts_of_a_first_token_are_compiling_its_step_and_sending() -> None:
    steps = line(1, {"a": 10}, new=["a"], first=["a"], arrived=[CAME]), line(2, sent={"a": 0.0215})
    assert parts(*steps) == {"handover": 4.0, "waiting": 3.0, "prefill": 10.0, "output": 1.5}

    step = line(1, {"a": 10}, new=["a"], first=["a"], arrived=[CAME])
    assert parts(step) == {"handover": 4.0, "waiting": 3.0, "prefill": 10.0}

    came = arrival("a", 10, 0.001, 0.008, compiled_s=0.006)
    step = line(1, {"a": 10}, new=["a"], first=["a"], arrived=[came], sent={"a": 0.02})
    assert parts(step) == {"compiling": 5.0, "handover": 2.0, "waiting": 2.0, "prefill": 10.0}

    (timeline,) = run_of(line(1, {"a": 6}, {"a": 0}, new=["a"], arrived=[CAME])).timelines
    assert ttft_parts(timeline) == []


def test_steps_between_chunks_are_told_from_those_that_computed_it() -> None:
    assert parts(
        line(1, arrived=[CAME]),
        line(2, {"a": 6}, {"a": 0}, new=["a"]),
        line(3, {"b": 1}),
        line(4, {"b": 1}),
        line(5, {"a": 4}, {"a": 6}, first=["a"], sent={"a": 0.0599}),
    ) == {"handover": 4.0, "waiting": 13.0, "prefill": 19.9, "between_chunks": 20.0}


def test_a_preemption_before_the_first_token_is_a_part() -> None:
    assert parts(
        line(1, {"a": 6}, {"a": 0}, new=["a"], arrived=[CAME]),
        line(2, {"b": 1}, preempted=["a"], preempted_by={"a": "b"}),
        line(4, {"a": 10}, {"a": 0}, resumed=["a"], first=["a"]),
        line(5, sent={"a": 0.052}),
    ) == {"handover": 4.0, "waiting": 3.0, "prefill": 20.0, "preempted": 20.0, "output": 2.0}


def test_steps_that_overlap_count_once() -> None:
    assert parts(
        line(1, {"a": 6}, {"a": 0}, new=["a"], arrived=[CAME], duration_ms=15.0),
        line(2, {"a": 4}, {"a": 6}, first=["a"], duration_ms=15.0),
        line(3, sent={"a": 0.036}),
    ) == {"handover": 4.0, "waiting": 3.0, "prefill": 25.0, "output": 1.0}


def reasons(run: RunTimeline, start_s: float, stop_s: float, name: str = "x") -> dict[str, Any]:
    """(ms, steps) of x by reason; their sum is checked here for all."""
    found = waits(run, run.timelines_of(name)[-1], start_s, stop_s)
    assert sum(wait.ms for wait in found) == pytest.approx((stop_s - start_s) * 1e3)
    assert {wait.reason for wait in found} <= REASONS.keys()
    return {wait.reason: (pytest.approx(wait.ms), wait.num_steps) for wait in found}


def waiting_behind(head: dict[str, Any], by: str = "rows", **x: Any) -> RunTimeline:
    """x came at 5 ms, and this one is first in line in steps 1 and 2; step 3 admits x."""
    came = [arrival("x", 4, 0.004, 0.005, **x)]
    if head["id"] != "x":
        came.append(head)
    return run_of(
        line(1, arrived=came, blocked=blocked(head["id"], by)),
        line(2, blocked=blocked(head["id"], by)),
        line(3, {"x": 4}, new=["x"]),
    )


@pytest.mark.parametrize("by", ["rows", "stage", "kv_blocks", "budget"])
def test_the_first_in_line_waits_for_what_it_lacks(by: str) -> None:
    run = waiting_behind(arrival("x", 4, 0.004, 0.005), by)
    assert reasons(run, 0.005, 0.03) == {by: (20.0, 2), "next_step": (5.0, 0)}


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (arrival("h", 4, 0.001, 0.002), "kv_blocks"),  # it came before
        (arrival("h", 4, 0.001, 0.002, priority=-1), "kv_blocks"),  # and would go first anyway
        (arrival("h", 4, 0.006, 0.007, priority=-1), "priority"),
        (arrival("h", 4, 0.006, 0.007, session=2), "turn"),
        (arrival("h", 4, 0.006, 0.007), "kv_blocks"),
    ],
)
def test_who_is_behind_waits_for_the_same_unless_it_was_passed_by(head: Any, why: str) -> None:
    assert reasons(waiting_behind(head, "kv_blocks"), 0.005, 0.03) == {
        why: (20.0, 2),
        "next_step": (5.0, 0),
    }


def test_one_that_was_preempted_passes_nobody_by() -> None:
    run = run_of(
        line(1, {"h": 9}, new=["h"], arrived=[arrival("h", 9, 0.001, 0.002, session=2)]),
        line(2, arrived=[arrival("x", 4, 0.014, 0.015)], preempted=["h"], blocked=None),
        line(3, blocked=blocked("h", "kv_blocks")),
        line(4, {"x": 4}, new=["x"]),
    )
    assert reasons(run, 0.025, 0.04) == {"kv_blocks": (10.0, 1), "next_step": (5.0, 0)}


def test_a_sample_waits_for_the_one_that_computes_the_prompt() -> None:
    came = [arrival("x", 8, 0.004, 0.005), arrival("x#1", 8, 0.004, 0.005, leader="x")]
    run = run_of(
        line(1, {"x": 5}, {"x": 0}, new=["x"], arrived=came),
        line(2, {"x": 3}, {"x": 5}, blocked=blocked("x#1", "rows")),
        line(3, {"x": 1}, {"x": 8}, blocked=blocked("x#1", "rows")),
        line(4, {"x#1": 8}, new=["x#1"]),
    )
    assert reasons(run, 0.005, 0.04, "x#1") == {
        "sample": (10.0, 1),
        "rows": (20.0, 2),
        "next_step": (5.0, 0),
    }


def test_who_never_ran_waited_until_the_end_of_the_trace() -> None:
    run = run_of(line(1, arrived=[arrival("x", 4, 0.004, 0.005)], blocked=blocked("x", "rows")))
    assert reasons(run, 0.005, 0.02) == {"rows": (10.0, 1), "next_step": (5.0, 0)}
