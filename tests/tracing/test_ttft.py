"""Where times to first tokens went, worked out by hand. A step each 10 ms, of 10 ms."""

from __future__ import annotations

from typing import Any

import pytest

from nanocore.tracing.explanation import PARTS, ttft_parts
from tests.tracing.trace_lines import arrival, line, run_of


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


def test_a_prompt_in_one_step() -> None:
    steps = line(1, {"a": 10}, new=["a"], first=["a"], arrived=[CAME]), line(2, sent={"a": 0.0215})
    assert parts(*steps) == {"handover": 4.0, "waiting": 3.0, "prefill": 10.0, "output": 1.5}


def test_what_is_not_sent_in_the_trace_counts_until_the_steps_end() -> None:
    step = line(1, {"a": 10}, new=["a"], first=["a"], arrived=[CAME])
    assert parts(step) == {"handover": 4.0, "waiting": 3.0, "prefill": 10.0}


def test_a_structured_output_is_compiled_first() -> None:
    came = arrival("a", 10, 0.001, 0.008, compiled_s=0.006)
    step = line(1, {"a": 10}, new=["a"], first=["a"], arrived=[came], sent={"a": 0.02})
    assert parts(step) == {"compiling": 5.0, "handover": 2.0, "waiting": 2.0, "prefill": 10.0}


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


def test_a_request_without_a_first_token_has_no_parts() -> None:
    (timeline,) = run_of(line(1, {"a": 6}, {"a": 0}, new=["a"], arrived=[CAME])).timelines
    assert ttft_parts(timeline) == []
