"""The demo model as a semantic test: a wrong KV slot gives a wrong answer, not "some" token.

A small sample of what `tests/demo_model/accuracy.py` measures.
"""

from __future__ import annotations

from functools import cache

import pytest

from nanocore.demo_model import demo_model_folder
from tests.demo_model.accuracy import CONDITIONS, Condition, Outcome, evaluate
from tests.demo_model.tasks import TASKS, held_out

pytestmark = pytest.mark.campaign

COUNT = 12
MAX_BYTES = 16 * 10**6


@cache
def outcome(name: str) -> Outcome:
    (condition,) = [c for c in CONDITIONS if c.name == name]
    return run(condition)


def run(condition: Condition) -> Outcome:
    examples = [example for task in TASKS for example in held_out(task, COUNT, seed=5)]
    return evaluate(condition, examples)


def test_the_weights_are_small_enough_to_ship() -> None:
    weights = demo_model_folder() / "model.safetensors"
    assert weights.stat().st_size <= MAX_BYTES


@pytest.mark.timeout(300)
@pytest.mark.parametrize("condition", [condition.name for condition in CONDITIONS])
def test_answers_to_held_out_prompts_are_right_however_they_are_scheduled(condition: str) -> None:
    accuracy = outcome(condition).accuracy
    assert accuracy.keys() == set(TASKS)
    # One example of a task's twelve may be wrong, and one in fifty over all.
    assert {task: share for task, share in accuracy.items() if share < 1 - 1.5 / COUNT} == {}
    assert sum(accuracy.values()) / len(accuracy) >= 0.98


@pytest.mark.timeout(300)
def test_each_condition_is_what_it_says() -> None:
    default, chunked = outcome("default"), outcome("chunked")
    assert default.num_preemptions == chunked.num_preemptions == 0
    assert chunked.tokens_per_step <= 48 < default.tokens_per_step
    assert outcome("preempted").num_preemptions > 0
    assert outcome("prefix hits").hit_rate > 0.5 > default.hit_rate
