"""Samples of one prompt: requests that share it through the prefix cache, one behind the other."""

from __future__ import annotations

import numpy as np
import pytest

from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.protocol.fields import MAX_EXACT_INT
from nanocore.worker.plan import NO_TOKEN, NewRow, SchedulerOutput
from tests.engine_core.scheduler_checks import (
    Engine,
    check_idle,
    check_plan,
)
from tests.fakes import (
    Deliveries,
    PipelinedExecutor,
    expected_logprobs,
    expected_tokens,
    make_request,
    make_scheduler,
    next_token,
)

PROMPT = [*range(10, 24)]  # 3 full blocks of 4, and 2 tokens


def in_line(engine: Engine) -> list[int]:
    return [request.handle for request in engine.scheduler.waiting]


def running(scheduler: Scheduler) -> list[int]:
    return sorted(request.handle for request in list(scheduler.running))


def computed(plan: SchedulerOutput) -> list[tuple[int, int]]:
    """(prompt tokens, those found cached) of each new row."""
    return [(new.num_prompt_tokens, new.num_computed_tokens) for new in plan.added]


def test_all_samples_are_admitted_in_one_step_and_compute_what_they_do_not_share() -> None:
    engine = Engine()
    engine.add(1, PROMPT, n=4)
    assert in_line(engine) == [1]
    assert (engine.scheduler.num_waiting, len(engine.scheduler.waiting)) == (4, 1)
    plan = engine.step()
    assert computed(plan) == [(14, 0), (14, 12), (14, 12), (14, 12)]
    assert plan.num_tokens == 14 + 3 * 2
    engine.finish()
    assert engine.deliveries.tokens == {h: expected_tokens(PROMPT, 4) for h in (1, 2, 3, 4)}
    assert engine.deliveries.num_cached == {1: 0, 2: 12, 3: 12, 4: 12}
    assert engine.scheduler.counters.prompt_tokens == 14 + 3 * 2


def test_samples_wait_until_the_last_chunk_of_the_prompt_is_planned() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.add(1, PROMPT, n=3)
    engine.step()
    assert (in_line(engine), running(engine.scheduler)) == ([], [1])
    assert computed(engine.step()) == [(14, 12)]  # 6 tokens of the budget, then 2
    assert (in_line(engine), running(engine.scheduler)) == ([3], [1, 2])
    engine.finish()
    assert engine.deliveries.num_cached == {1: 0, 2: 12, 3: 12}


@pytest.mark.parametrize(("policy", "queued"), [("fcfs", [2, 3, 4, 5]), ("priority", [2, 3, 5, 4])])
def test_samples_go_before_all_that_came_after_their_request(
    policy: str, queued: list[int]
) -> None:
    engine = Engine(max_num_batched_tokens=8, max_num_seqs=1, policy=policy)
    engine.add(1, PROMPT, n=3, priority=-1)
    engine.add(4, [7] * 3)
    engine.step()
    engine.add(5, [8] * 3, priority=-1)
    assert in_line(engine) == [handle for handle in queued if handle > 3]
    engine.step()
    assert in_line(engine) == queued
    engine.finish()


def test_without_a_prefix_cache_each_sample_computes_the_prompt() -> None:
    for limits, more in (({"enable_prefix_caching": False}, {}),
                         ({}, {"skip_reading_prefix_cache": True})):  # fmt: skip
        engine = Engine(**limits)
        engine.add(1, PROMPT, n=3, **more)
        assert engine.step().num_tokens == 3 * 14
        engine.finish()
        assert engine.deliveries.num_cached == {1: 0, 2: 0, 3: 0}


def test_handles_and_seeds_count_on_and_seeds_wrap() -> None:
    request = make_request(7, PROMPT, 4, n=1)
    request.seed = MAX_EXACT_INT - 1
    request.add_siblings(3)
    assert [one.handle for one in request.samples] == [7, 8, 9, 10]
    assert [one.seed for one in request.samples] == [MAX_EXACT_INT - 1, MAX_EXACT_INT, 0, 1]
    assert [one.request_id for one in request.samples] == ["r7", "r7#1", "r7#2", "r7#3"]
    first, *others = request.samples
    assert all(one.token_ids is first.token_ids for one in others)
    others[0].key_chain.extend(np.zeros(40, "<i4").tobytes())
    assert len(first.key_chain.keys) == len(others[1].key_chain.keys) == 3


def test_when_the_first_ends_before_its_prompt_is_planned_the_next_computes_it() -> None:
    engine = Engine(max_num_batched_tokens=8)
    engine.add(1, PROMPT, n=4)
    assert engine.scheduler.abort(1) is not None  # while it waits
    assert in_line(engine) == [2]
    engine.step()
    assert engine.scheduler.abort(2) is not None  # while it computes
    assert in_line(engine) == [3]
    engine.step()
    assert (running(engine.scheduler), in_line(engine)) == ([3, 4], [])
    engine.finish()
    assert engine.deliveries.tokens == {h: expected_tokens(PROMPT, 4) for h in (3, 4)}
    assert engine.deliveries.num_cached == {3: 8, 4: 12}


def test_a_first_sample_that_is_preempted_in_its_prompt_holds_the_others_back_meanwhile() -> None:
    engine = Engine(long_prefill_token_threshold=1, num_blocks=9, max_num_seqs=4)
    engine.add(1, [5] * 6, max_tokens=24)
    engine.step()
    engine.add(2, [*range(24)], n=2, max_tokens=2)
    preempted_at_prompt = False
    while engine.scheduler.num_requests:
        engine.step()
        leader = engine.scheduler.waiting.head()
        preempted_at_prompt |= (
            leader is not None and leader.handle == 2 and bool(leader.waiting_siblings)
        )
    assert preempted_at_prompt
    assert engine.scheduler.counters.num_preemptions > 0
    assert engine.deliveries.tokens == {
        1: expected_tokens([5] * 6, 24),
        **{h: expected_tokens([*range(24)], 2) for h in (2, 3)},
    }
    check_idle(engine.scheduler)


def test_a_first_sample_without_a_token_does_not_end_the_others() -> None:
    engine = Engine()
    calls = iter([NO_TOKEN])
    engine.executor.sample = lambda context: next(calls, next_token(context))
    engine.add(1, PROMPT, n=3)
    engine.finish()
    assert engine.deliveries.finish_reasons == {1: "error", 2: "length", 3: "length"}


@pytest.mark.parametrize("num_groups", [2, 3])
def test_pipeline_groups_share_the_samples_evenly(num_groups: int) -> None:
    scheduler, executor = make_scheduler(num_groups=num_groups, max_num_batched_tokens=8)
    worker, deliveries = PipelinedExecutor(executor), Deliveries()
    scheduler.add(make_request(1, PROMPT, 6, n=6))
    sizes = set()
    while scheduler.num_requests or len(worker):
        while len(worker) < num_groups and (group := scheduler.next_group()) is not None:
            plan = scheduler.schedule(group)
            check_plan(scheduler, plan)
            worker.submit(plan)
        sizes.add(tuple(scheduler.running.row_counts(group)[0] for group in range(num_groups)))
        deliveries.take(scheduler, worker.collect())
    assert (6 // num_groups,) * num_groups in sizes
    assert deliveries.tokens == {handle: expected_tokens(PROMPT, 6) for handle in range(1, 7)}
    check_idle(scheduler)


def test_only_the_first_sample_asks_for_the_prompts_log_probabilities() -> None:
    engine = Engine()
    engine.add(1, PROMPT, n=3, prompt_logprobs=2, logprobs=1)
    added: list[NewRow] = engine.step().added
    assert [new.sampling.prompt_logprobs for new in added] == [2, None, None]
    assert [new.sampling.logprobs for new in added] == [1, 1, 1]
    engine.finish()
    assert engine.deliveries.prompt_logprobs == {1: expected_logprobs(PROMPT[:1], PROMPT[1:], 2)}
    assert engine.deliveries.num_cached == {1: 0, 2: 12, 3: 12}


def test_samples_that_find_no_row_wait_in_line() -> None:
    engine = Engine(max_num_seqs=2)
    engine.add(1, PROMPT, n=5)
    engine.add(6, [9] * 5)
    engine.step()
    assert (running(engine.scheduler), in_line(engine)) == ([1, 2], [3, 4, 5, 6])
    engine.finish()
    assert engine.deliveries.tokens.keys() == {1, 2, 3, 4, 5, 6}
