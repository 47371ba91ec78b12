"""Why requests waited, with milliseconds worked out by hand. A step each 10 ms; x waits."""

from __future__ import annotations

from typing import Any

import pytest

from nanocore.tracing.explanation import REASONS, waits
from nanocore.tracing.timeline import RunTimeline
from tests.tracing.trace_lines import arrival, blocked, line, run_of, without_new_keys


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


@pytest.mark.parametrize("by", ["rows", "stage", "kv_blocks", "budget", "partial_prefills"])
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


def test_an_older_engines_trace_does_not_tell() -> None:
    steps = [line(1), line(2, {"x": 3}, new=["x"])]
    run = run_of(*map(without_new_keys, steps))
    assert reasons(run, 0.01, 0.02) == {"unknown": (10.0, 1)}
