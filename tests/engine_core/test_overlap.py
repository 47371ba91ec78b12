"""Steps in flight: the next one is planned before the result of the last is in."""

from __future__ import annotations

import numpy as np

from nanocore.engine_core.scheduling.scheduler import Scheduler
from tests.engine_core.scheduler_checks import check_blocks, check_idle, check_plan
from tests.fakes import (
    Deliveries,
    PipelinedExecutor,
    expected_tokens,
    make_request,
    make_scheduler,
)
from tests.kv_cache.counts import num_fenced_blocks


class Pipeline:
    """A scheduler with `depth` steps in flight."""

    def __init__(self, depth: int = 2, **limits: object) -> None:
        self.depth = depth
        self.scheduler, executor = make_scheduler(**limits)  # type: ignore[arg-type]
        self.worker = PipelinedExecutor(executor)
        self.deliveries = Deliveries()

    def plan(self) -> int:
        """Plan a step and start it; returns its tokens."""
        plan = self.scheduler.schedule()
        check_plan(self.scheduler, plan)
        self.worker.submit(plan)
        return plan.num_tokens

    def collect(self) -> None:
        """Take in the oldest step's result."""
        self.deliveries.take(self.scheduler, self.worker.collect())
        check_blocks(self.scheduler)

    def finish(self) -> None:
        """Run to the end."""
        while self.scheduler.num_requests:
            while len(self.worker) < self.depth:
                self.plan()
            self.collect()
        while len(self.worker):
            self.collect()
        check_idle(self.scheduler)


def known(scheduler: Scheduler, row: int) -> tuple[int, int]:
    """(tokens known, tokens computed or planned) of a row."""
    running = scheduler.running
    return len(running.known_tokens(row)), running.num_computed[row]


def test_a_token_is_planned_before_it_is_known() -> None:
    pipeline = Pipeline()
    pipeline.scheduler.add(make_request(1, [1] * 5, 4))
    assert pipeline.plan() == 5
    assert pipeline.plan() == 1
    assert known(pipeline.scheduler, 0) == (5, 6)
    pipeline.collect()
    assert known(pipeline.scheduler, 0) == (6, 6)
    pipeline.finish()
    assert pipeline.deliveries.tokens[1] == expected_tokens([1] * 5, 4)


def test_a_row_that_waits_for_its_last_token_computes_nothing() -> None:
    pipeline = Pipeline()
    pipeline.scheduler.add(make_request(1, [1] * 5, 2))
    assert [pipeline.plan(), pipeline.plan(), pipeline.plan()] == [5, 1, 0]
    assert pipeline.scheduler.num_running == 1


def test_what_was_computed_past_a_stop_is_dropped_and_its_block_is_held_until_then() -> None:
    prompt = [3, 1, 4]
    tokens = expected_tokens(prompt, 9)
    stop = next(t for t in tokens if tokens.index(t) >= 2)
    num_outputs = tokens.index(stop) + 1
    pipeline = Pipeline(num_blocks=64)
    scheduler = pipeline.scheduler
    scheduler.add(make_request(1, prompt, 30, eos=(stop,)))
    pipeline.plan()
    for _ in range(num_outputs - 1):
        pipeline.plan()
        pipeline.collect()
    pipeline.plan()  # computes the EOS, which nobody knows yet
    pipeline.collect()
    assert pipeline.deliveries.finish_reasons == {1: "stop"}
    assert scheduler.num_requests == 0
    assert num_fenced_blocks(scheduler.kv_cache) > 0
    assert scheduler.kv_cache.num_free_blocks == 64 - num_fenced_blocks(scheduler.kv_cache)
    pipeline.collect()
    assert scheduler.kv_cache.num_free_blocks == 64
    assert pipeline.deliveries.tokens[1] == tokens[:num_outputs]


def test_a_row_waits_for_blocks_that_a_step_in_flight_is_about_to_release() -> None:
    # 4 blocks of 4: request 1 holds 2 and ends, request 2 needs a third.
    pipeline = Pipeline(num_blocks=4, block_size=4, enable_prefix_caching=False)
    scheduler = pipeline.scheduler
    scheduler.add(make_request(1, [1] * 5, 9))
    scheduler.add(make_request(2, [2] * 8, 9))
    assert pipeline.plan() == 13
    pipeline.collect()
    scheduler.abort(1)
    pipeline.plan()
    pipeline.finish()
    assert scheduler.counters.num_preemptions == 0

    pipeline = Pipeline(num_blocks=4, block_size=4, enable_prefix_caching=False)
    scheduler = pipeline.scheduler
    scheduler.add(make_request(1, [1] * 5, 9))
    scheduler.add(make_request(2, [2] * 8, 9))
    assert pipeline.plan() == 13
    scheduler.abort(1)  # its blocks may still be written by the step in flight
    assert pipeline.plan() == 0
    assert scheduler.planned.stalled == {1}
    assert scheduler.counters.num_preemptions == 0
    pipeline.finish()
    assert pipeline.deliveries.tokens[2] == expected_tokens([2] * 8, 9)


def test_a_row_waits_for_blocks_of_a_request_whose_last_token_is_in_flight() -> None:
    # 4 blocks of 4, all held after step 1, which samples A's only token. Step 2: B needs a third
    # block, and A's two are as good as free.
    pipeline = Pipeline(num_blocks=4, block_size=4, enable_prefix_caching=False)
    scheduler = pipeline.scheduler
    scheduler.add(make_request(1, [1] * 8, 1))
    scheduler.add(make_request(2, [2] * 8, 6))
    assert pipeline.plan() == 16
    assert pipeline.plan() == 0
    assert scheduler.planned.stalled == {1}
    pipeline.finish()
    assert scheduler.counters.num_preemptions == 0
    assert pipeline.deliveries.tokens[2] == expected_tokens([2] * 8, 6)


def test_a_block_is_cached_once_its_tokens_are_known_even_if_they_come_late() -> None:
    # 3 prompt tokens and 5 outputs fill two blocks of 4; the last output's KV is never needed.
    pipeline = Pipeline(depth=3, block_size=4)
    pipeline.scheduler.add(make_request(1, [7, 7, 7], 6))
    while pipeline.scheduler.num_requests:
        while len(pipeline.worker) < 3:
            pipeline.plan()
        pipeline.collect()
    answer = pipeline.deliveries.tokens[1]
    pipeline.scheduler.add(make_request(2, [7, 7, 7, *answer, 1], 1))
    while pipeline.scheduler.num_requests:
        pipeline.plan()
        pipeline.collect()
    assert pipeline.deliveries.num_cached[2] == 8


def test_the_plan_of_a_dead_row_is_told_to_workers_with_its_removal() -> None:
    pipeline = Pipeline()
    pipeline.scheduler.add(make_request(1, [1] * 5, 9))
    pipeline.plan()
    pipeline.scheduler.abort(1)
    plan = pipeline.scheduler.schedule()
    assert np.frombuffer(plan.removed_rows, "<i4").tolist() == [0]
    assert plan.num_tokens == 0


def test_with_nothing_running_a_blocked_head_is_tried_while_blocks_are_still_fenced() -> None:
    # 10 blocks, 2 of them watermark. 1 holds 6 and leaves 4: of these 2 may not have 3. When 1 is
    # aborted its blocks are fenced, but nobody runs whom the watermark serves.
    pipeline = Pipeline(num_blocks=10, block_size=4, watermark=0.2)
    scheduler = pipeline.scheduler
    scheduler.add(make_request(1, [1] * 24, 2))
    scheduler.add(make_request(2, [2] * 12, 2))
    assert pipeline.plan() == 24
    scheduler.abort(1)
    assert (scheduler.kv_cache.num_free_blocks, num_fenced_blocks(scheduler.kv_cache)) == (4, 6)
    assert pipeline.plan() == 12
    pipeline.finish()


def test_nobody_is_admitted_while_a_chunk_waits_for_blocks_about_to_be_released() -> None:
    # 8 blocks of 4, budget 12, chunks of 8. Step 1: 8 of 1's 24 tokens, 2's 4 tokens: 3 blocks.
    # Step 2: 8 of 1, 2 decodes, 3's 2 tokens: 4 blocks, and 1 is free. Then 2 is aborted: 1's last
    # chunk needs 2 blocks, and waits for those of 2; 4, which needs 1, does not take it away.
    pipeline = Pipeline(
        num_blocks=8, block_size=4, max_num_batched_tokens=12, long_prefill_token_threshold=8
    )
    scheduler = pipeline.scheduler
    scheduler.add(make_request(1, [1] * 24, 2))
    scheduler.add(make_request(2, [2] * 4, 9))
    assert pipeline.plan() == 12
    scheduler.add(make_request(3, [3] * 2, 9))
    assert pipeline.plan() == 11
    pipeline.collect()
    scheduler.abort(2)
    scheduler.add(make_request(4, [4] * 2, 2))
    assert (scheduler.kv_cache.num_free_blocks, num_fenced_blocks(scheduler.kv_cache)) == (1, 2)
    assert pipeline.plan() == 1  # 3 decodes
    assert scheduler.planned.stalled == {0}
    assert not scheduler.planned.new
    pipeline.collect()
    assert pipeline.plan() == 8 + 1 + 2
    assert scheduler.counters.num_preemptions == 0
    pipeline.finish()


def test_a_chunk_that_waits_for_the_one_block_in_release_leaves_its_budget_to_others() -> None:
    # 8 blocks of 4, budget 9, chunks of 6. Steps 1 to 3 compute 6 each of 3's 24 tokens (2, 3, 5
    # blocks), while 1 and 2 decode in a block each; step 3 also one of 4's 4 tokens. Step 4: 2 was
    # aborted, and 3 waits for its block. 1 decodes, 4 gets the 3 tokens it lacks, not 9 - 1 - 6.
    pipeline = Pipeline(
        num_blocks=8, block_size=4, max_num_batched_tokens=9, long_prefill_token_threshold=6
    )
    scheduler = pipeline.scheduler
    for handle, length in ((1, 1), (2, 2), (3, 24)):
        scheduler.add(make_request(handle, [handle] * length, 9))
    assert pipeline.plan() == 1 + 2 + 6
    assert pipeline.plan() == 1 + 1 + 6
    pipeline.collect()
    scheduler.add(make_request(4, [4] * 4, 9))
    assert pipeline.plan() == 1 + 1 + 6 + 1
    pipeline.collect()
    scheduler.abort(2)
    assert (scheduler.kv_cache.num_free_blocks, num_fenced_blocks(scheduler.kv_cache)) == (0, 1)
    assert pipeline.plan() == 1 + 3
    assert scheduler.planned.stalled == {2}
    assert not scheduler.planned.preempted
    pipeline.finish()


def test_a_row_whose_last_token_is_in_flight_is_not_preempted() -> None:
    # 4 blocks of 4, all held after step 1: 8 of the 16 tokens of 1 in two blocks, 2 and 3 one each,
    # and the only token of 3 is in flight. In step 2, 1 needs two blocks; 3 will release one, and
    # 2 goes for the other, although 3 came last.
    pipeline = Pipeline(num_blocks=4, block_size=4, long_prefill_token_threshold=8)
    scheduler = pipeline.scheduler
    for handle, num_prompt, max_tokens in ((1, 16, 1), (2, 1, 9), (3, 1, 1)):
        scheduler.add(make_request(handle, [handle] * num_prompt, max_tokens))
    assert pipeline.plan() == 8 + 1 + 1
    assert pipeline.plan() == 0
    assert [request.handle for request in scheduler.planned.preempted] == [2]
    assert scheduler.planned.stalled == {0}
    pipeline.finish()
    for handle, num_prompt, max_tokens in ((1, 16, 1), (2, 1, 9), (3, 1, 1)):
        expected = expected_tokens([handle] * num_prompt, max_tokens)
        assert pipeline.deliveries.tokens[handle] == expected
