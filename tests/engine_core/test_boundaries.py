"""The scheduler at its edges, with worked numbers: blocks, budget, rows, lengths."""

from __future__ import annotations

import pytest

from tests.engine_core.scheduler_checks import Engine, check_idle, check_plan
from tests.fakes import Deliveries, expected_tokens, make_request, make_scheduler


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "num_blocks"),
    [
        (3, 1, 1),
        (4, 1, 1),  # the only output's KV is never needed
        (5, 1, 2),
        (4, 2, 2),  # its first output's is
        (7, 2, 2),
        (8, 1, 2),
        (8, 2, 3),
        (1, 8, 2),
        (1, 9, 3),
    ],
)
def test_a_request_takes_the_blocks_of_all_its_tokens_but_the_last(
    num_prompt: int, max_tokens: int, num_blocks: int
) -> None:
    # With exactly so many blocks of 4 it runs, and at its end it holds all of them.
    engine = Engine(num_blocks=num_blocks, block_size=4)
    engine.add(1, [1] * num_prompt, max_tokens)
    most = 0
    while engine.scheduler.num_requests:
        plan = engine.scheduler.schedule()
        check_plan(engine.scheduler, plan)
        most = max(most, num_blocks - engine.scheduler.kv_cache.num_free_blocks)
        engine.deliveries.take(engine.scheduler, engine.executor.execute(plan))
    assert most == num_blocks
    assert engine.scheduler.counters.num_preemptions == 0
    assert engine.tokens[1] == expected_tokens([1] * num_prompt, max_tokens)
    check_idle(engine.scheduler)


@pytest.mark.parametrize(
    ("num_prompt", "steps"), [(9, [9, 1]), (10, [10, 1]), (11, [10, 1, 1]), (20, [10, 10, 1])]
)
def test_a_prompt_at_the_edge_of_the_budget(num_prompt: int, steps: list[int]) -> None:
    engine = Engine(max_num_batched_tokens=10)
    engine.add(1, [1] * num_prompt, 2)
    assert [engine.step().num_tokens for _ in steps] == steps
    assert engine.scheduler.num_requests == 0


@pytest.mark.parametrize(("second", "third"), [(5, 1), (6, 0), (7, 0)])
def test_what_the_first_prompts_leave_of_the_budget_goes_to_the_next(
    second: int, third: int
) -> None:
    # Budget 10: 4 for the first, up to 6 for the second; the third has what is left, or waits.
    scheduler, executor = make_scheduler(max_num_batched_tokens=10)
    for handle, num_prompt in ((1, 4), (2, second), (3, 5)):
        scheduler.add(make_request(handle, [handle] * num_prompt, 2))
    Deliveries().step(scheduler, executor)
    counts = [chunk.num_tokens for chunk in scheduler.completed.plan.chunks]
    assert counts == [4, min(second, 6), *([third] if third else [])]


def test_as_many_rows_as_the_budget_has_tokens_all_decode() -> None:
    engine = Engine(max_num_seqs=4, max_num_batched_tokens=4)
    for handle in range(1, 6):
        engine.add(handle, [handle], 5)
    assert engine.step().num_tokens == 4
    assert engine.step().num_tokens == 4
    # The fifth lacks a row.
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (4, 1)


@pytest.mark.parametrize(("num_prompt", "admitted"), [(4, True), (5, False)])
def test_with_one_block_left_a_prompt_of_one_block_is_admitted(
    num_prompt: int, admitted: bool
) -> None:
    # 4 blocks of 4; the first request holds 3 and grows no further for three steps.
    engine = Engine(num_blocks=4, block_size=4)
    engine.add(1, [1] * 9, 3)
    engine.step()
    assert engine.scheduler.kv_cache.num_free_blocks == 1
    engine.add(2, [2] * num_prompt, 1)
    engine.step()
    assert (2 in engine.tokens) is admitted


def test_one_block_left_and_two_rows_that_need_it() -> None:
    # 5 blocks of 4: two requests of 8 tokens hold 2 each, and both cross in the same step. The
    # first takes the last block; for the second nothing is left, and as the later one it goes.
    engine = Engine(num_blocks=5, block_size=4)
    for handle in (1, 2):
        engine.add(handle, [handle] * 8, 4)
    engine.step()
    assert engine.scheduler.kv_cache.num_free_blocks == 1
    engine.step()
    assert [request.handle for request in engine.completed.preempted] == [2]
    assert engine.scheduler.kv_cache.block_ids(1) == [0, 1, 4]
    engine.run()
    assert engine.tokens[2] == expected_tokens([2] * 8, 4)


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(15, 1), (16, 1), (1, 15), (8, 8), (12, 4)])
def test_prompt_and_output_at_the_models_length_fill_the_smallest_pool(
    num_prompt: int, max_tokens: int
) -> None:
    # max_model_len 16 needs KV of 15 tokens, or of 16 that one token follows: 4 blocks of 4.
    engine = Engine(num_blocks=4, block_size=4, max_model_len=16)
    for handle in (1, 2):  # the second one waits for the first, and needs every block, too
        request = make_request(handle, [handle] * num_prompt, max_tokens, max_model_len=16)
        engine.scheduler.add(request)
    engine.run()
    for handle in (1, 2):
        assert engine.tokens[handle] == expected_tokens([handle] * num_prompt, max_tokens)
        assert engine.finish_reasons[handle] == "length"


@pytest.mark.parametrize(("num_prompt", "num_cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_a_repeated_prompt_hits_its_full_blocks_but_never_its_last_token(
    num_prompt: int, num_cached: int
) -> None:
    engine = Engine(block_size=4)
    for handle in (1, 2):
        engine.add(handle, list(range(num_prompt)), 1)
        engine.step()
    assert engine.num_cached == {1: 0, 2: num_cached}
