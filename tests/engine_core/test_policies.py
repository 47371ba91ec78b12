"""Who is admitted first, who is preempted, and who may not be starved; with worked numbers."""

from __future__ import annotations

import numpy as np
import pytest

from nanocore.engine_core.policy.order import precedence_key
from nanocore.engine_core.policy.waiting_queue import RequestHeap
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.engine_core.scheduling.step_plan import StepPlan
from tests.engine_core.scheduler_checks import Engine
from tests.fakes import expected_tokens, make_request


def handles(requests: object) -> list[int]:
    return [request.handle for request in requests]  # type: ignore[attr-defined]


def record_lookups(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each prompt that is looked up in the prefix cache from here on."""
    lookups: list[int] = []
    find_prefix = scheduler.kv_cache.find_prefix

    def recording(keys: object, num_tokens: int) -> object:
        lookups.append(num_tokens)
        return find_prefix(keys, num_tokens)  # type: ignore[arg-type]

    monkeypatch.setattr(scheduler.kv_cache, "find_prefix", recording)
    return lookups


def test_fcfs_orders_by_arrival_and_ignores_priorities() -> None:
    queue = RequestHeap(precedence_key("fcfs", 0))
    for handle, priority in ((1, 9), (2, -9), (3, 0)):
        queue.push(make_request(handle, [1], 1, priority=priority))
    assert handles(queue) == [1, 2, 3]


def test_priority_orders_by_priority_then_arrival_then_handle() -> None:
    queue = RequestHeap(precedence_key("priority", 0))
    for handle, priority, arrival in ((1, 5, 0), (2, 0, 7), (3, 0, 2), (4, 0, 2), (5, -1, 9)):
        request = make_request(handle, [1], 1, priority=priority)
        request.arrival = arrival
        queue.push(request)
    assert handles(queue) == [5, 3, 4, 2, 1]


def test_removed_requests_are_passed_over_and_do_not_pile_up() -> None:
    queue = RequestHeap(precedence_key("fcfs", 0))
    head = make_request(0, [1], 1)
    queue.push(head)
    for handle in range(1, 2000):  # a client that submits and aborts, behind a blocked head
        request = make_request(handle, [1], 1)
        queue.push(request)
        queue.remove(request)
    assert len(queue) == 1
    assert queue.head() is head
    assert len(queue._heap) < 100
    queue.remove(head)
    assert queue.head() is None


def test_the_least_urgent_row_gives_way_even_if_it_was_served_in_this_step() -> None:
    # 8 blocks of 4. Step 1: A and B prefill 8 tokens, 2 blocks each. Step 2: A and B decode into a
    # third block each, C prefills 8 tokens: all 8 blocks are held. Step 3: C needs one.
    engine = Engine(policy="priority", num_blocks=8, block_size=4)
    engine.add(1, [1] * 8, 12, priority=0)
    engine.add(2, [2] * 8, 12, priority=5)
    engine.step()
    engine.add(3, [3] * 8, 12, priority=0)
    engine.step()
    assert engine.scheduler.kv_cache.num_free_blocks == 0
    plan = engine.step()
    assert handles(engine.completed.preempted) == [2]  # neither the last nor the one in need
    assert plan.num_tokens == 2  # A and C: nobody was skipped
    engine.run()
    assert list(engine.finish_reasons) == [1, 3, 2]
    assert engine.tokens[2] == expected_tokens([2] * 8, 12)


def test_the_tokens_of_a_preempted_row_return_to_the_budget_of_the_same_step() -> None:
    # 9 blocks of 4, budget 10. Step 4: A and B (2 blocks each) cross into a third, D computes its
    # second chunk and lacks a block: B goes, and D gets B's token of this very step, too.
    engine = Engine(policy="priority", num_blocks=9, block_size=4, max_num_batched_tokens=10)
    engine.add(1, [1] * 6, 20, priority=0)
    engine.add(2, [2] * 7, 20, priority=5)
    assert [engine.step().num_tokens for _ in range(2)] == [10, 4]
    engine.add(4, [4] * 20, 2, priority=0)
    engine.step()
    assert [chunk.num_tokens for chunk in engine.completed.scheduled()] == [1, 1, 8]
    plan = engine.step()
    assert handles(engine.completed.preempted) == [2]
    assert [chunk.num_tokens for chunk in engine.completed.scheduled()] == [1, 9]
    assert plan.num_tokens == 10


def test_of_equals_the_one_that_costs_least_to_recompute_is_preempted() -> None:
    # 1 (4 tokens) and 2 (12 tokens) came together; 2 is the later one, and the dearer.
    engine = Engine(num_blocks=6, block_size=4)
    engine.add(1, [1] * 4, 12)
    engine.add(2, [2] * 12, 12)
    preempted: list[int] = []
    while engine.scheduler.num_requests:
        engine.step()
        preempted += handles(engine.completed.preempted)
    assert preempted[0] == 1
    assert engine.tokens[1] == expected_tokens([1] * 4, 12)


def test_what_was_found_in_the_cache_does_not_count_as_a_cost() -> None:
    # 2 and 3 came together. 2 has 14 tokens of which 12 were cached; 3 computed all its 8.
    engine = Engine(num_blocks=9, block_size=4)
    prefix = [5] * 12
    engine.add(1, [*prefix, 1], 1)
    engine.step()
    engine.add(2, [*prefix, 2, 2], 20)
    engine.add(3, [3] * 8, 20)
    engine.step()
    assert engine.num_cached == {1: 0, 2: 12, 3: 0}
    preempted: list[int] = []
    while not preempted:
        engine.step()
        preempted += handles(engine.completed.preempted)
    assert preempted == [2]


def test_later_arrivals_go_before_cheaper_ones() -> None:
    engine = Engine(num_blocks=6, block_size=4)
    engine.add(1, [1] * 4, 12)
    engine.step()
    engine.add(2, [2] * 12, 8)  # dearer, and one step later
    preempted: list[int] = []
    while not preempted:
        engine.step()
        preempted += handles(engine.completed.preempted)
    assert preempted == [2]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_preempted_request_goes_before_equals_that_never_ran(policy: str) -> None:
    engine = Engine(policy=policy, num_blocks=8, block_size=4, max_num_seqs=2)
    for handle in (1, 2, 3):
        engine.add(handle, [handle] * 8, 12)
    order: list[int] = []
    while engine.scheduler.num_requests:
        plan = engine.step()
        # The prompts consist of their handles.
        order += [int(np.frombuffer(new.token_ids, "<i4")[0]) for new in plan.added]
    assert order == [1, 2, 2, 3]


def test_admission_leaves_the_watermark_free_while_requests_run() -> None:
    # 10 blocks, 2 of them watermark: 6 for the first leave 4, of which the second may take 2.
    engine = Engine(num_blocks=10, block_size=4, watermark=0.2)
    engine.add(1, [1] * 24, 2)
    engine.add(2, [2] * 12, 2)
    engine.step()
    assert handles(engine.completed.new) == [1]
    engine.run()
    assert list(engine.finish_reasons) == [1, 2]
    engine.add(3, [3] * 40, 1)  # alone, it may have all
    engine.step()
    assert engine.finish_reasons[3] == "length"


def test_skipping_the_cache_computes_the_whole_prompt_and_still_feeds_the_cache() -> None:
    engine = Engine(block_size=4)
    prompt = list(range(10))
    for handle, skip in ((1, True), (2, True), (3, False)):
        request = make_request(handle, prompt, 2, skip_reading_prefix_cache=skip)
        engine.scheduler.add(request)
        while engine.scheduler.num_requests:
            engine.step()
    assert engine.num_cached == {1: 0, 2: 0, 3: 8}


def test_a_head_that_does_not_fit_is_looked_up_again_only_when_blocks_were_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(num_blocks=8, block_size=4)
    lookups = record_lookups(engine.scheduler, monkeypatch)
    engine.add(1, [1] * 16, 12)
    engine.add(2, [2] * 24, 2)
    engine.run()
    assert lookups == [16, 24, 24]


def test_a_blocked_head_is_tried_again_when_one_of_several_rows_frees_its_blocks() -> None:
    # 8 blocks of 4: 1 holds 2 and stays, 2 holds 3 and ends; 3 wants 4 and finds 3.
    engine = Engine(num_blocks=8, block_size=4)
    engine.add(1, [1] * 6, 3)
    engine.add(2, [2] * 11, 2)
    engine.step()
    engine.add(3, [3] * 16, 2)
    engine.step()
    assert handles(engine.scheduler.waiting) == [3]
    assert list(engine.finish_reasons) == [2]
    engine.step()
    assert handles(engine.completed.new) == [3]
    assert engine.tokens.keys() == {1, 2, 3}
    assert list(engine.finish_reasons) == [2, 1]


def test_a_blocked_head_is_not_looked_up_while_the_free_blocks_stay_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 1 decodes within its fourth block for 3 steps: 4 of 8 blocks stay free, 2 wants 5.
    engine = Engine(num_blocks=8, block_size=4)
    lookups = record_lookups(engine.scheduler, monkeypatch)
    engine.add(1, [1] * 13, 9)
    engine.add(2, [2] * 20, 2)
    for _ in range(4):
        engine.step()
        assert engine.scheduler.kv_cache.num_free_blocks == 4
    assert lookups == [13, 20]


def test_a_more_urgent_request_is_tried_although_the_head_before_it_is_blocked() -> None:
    engine = Engine(policy="priority", num_blocks=8, block_size=4)
    engine.add(1, [1] * 13, 9)
    engine.add(2, [2] * 20, 2)  # 5 blocks, and 4 are free
    engine.step()
    engine.add(3, [3] * 2, 2, priority=-1)
    engine.step()
    assert handles(engine.completed.new) == [3]


def test_the_order_stays_right_when_most_of_the_queue_was_removed() -> None:
    queue = RequestHeap(precedence_key("priority", 0))
    requests = [make_request(i, [1], 1, priority=i * 37 % 211) for i in range(210)]
    for request in requests:
        queue.push(request)
    for request in requests:
        if request.priority % 5:
            queue.remove(request)
    assert len(queue._heap) < 210  # what was removed behind the head is swept out
    order = []
    while (head := queue.head()) is not None:
        order.append(head.priority)
        queue.remove(head)
    assert order == list(range(0, 211, 5))


def test_an_urgent_request_takes_the_row_of_the_least_urgent_one_and_no_token_is_lost() -> None:
    engine = Engine(policy="priority", max_num_seqs=2)
    engine.add(1, [1] * 5, 6, priority=3)
    engine.add(2, [2] * 5, 6, priority=7)
    for _ in range(3):
        engine.step()
    engine.add(3, [3] * 5, 2, priority=5)
    engine.step()
    plan = engine.completed
    assert (handles(plan.preempted), handles(plan.new)) == ([2], [3])
    engine.run()
    assert list(engine.finish_reasons) == [3, 1, 2]
    for handle, num_tokens in ((1, 6), (2, 6), (3, 2)):
        assert engine.tokens[handle] == expected_tokens([handle] * 5, num_tokens)


def test_it_takes_blocks_of_as_many_as_it_needs_the_last_first() -> None:
    # 9 blocks of 4: 1, 2 and 3 hold 2 each, and 3 are free; 4 needs 6.
    engine = Engine(policy="priority", num_blocks=9, block_size=4)
    for handle in (1, 2, 3):
        engine.add(handle, [handle] * 6, 8, priority=handle)
    engine.step()
    engine.add(4, [4] * 24, 1, priority=0)
    engine.step()
    plan = engine.completed
    assert (handles(plan.preempted), handles(plan.new)) == ([3, 2], [4])


def test_nobody_gives_way_in_vain_or_to_an_equal() -> None:
    # 8 blocks of 4: 1 holds 4 of them, 2 holds 2, and 2 are free.
    engine = Engine(policy="priority", num_blocks=8, block_size=4)
    engine.add(1, [1] * 14, 2, priority=0)
    engine.add(2, [2] * 6, 2, priority=5)
    engine.step()
    engine.add(3, [3] * 20, 2, priority=0)  # 5 blocks: all of 2's are too few
    engine.add(4, [4] * 20, 2, priority=5)
    engine.step()
    plan = engine.completed
    assert (plan.preempted, plan.new) == ([], [])


def test_without_priorities_nobody_gives_way() -> None:
    engine = Engine(policy="fcfs", max_num_seqs=1)
    engine.add(1, [1], 3, priority=5)
    engine.step()
    engine.add(2, [2], 3, priority=-5)
    engine.step()
    assert engine.completed.preempted == []


def test_chunks_of_prompts_go_by_priority_and_behind_an_urgent_one_that_waits() -> None:
    # A budget of 16. 1 and 2 are in chunks when 3 comes, whose 10 tokens go first.
    engine = Engine(policy="priority", max_num_batched_tokens=16, long_prefill_token_threshold=8)
    engine.add(1, [1] * 40, 2, priority=5)
    engine.add(2, [2] * 40, 2, priority=4)

    def chunks() -> dict[int, int]:
        plan = engine.step()
        assert plan.num_tokens <= 16
        step = engine.completed
        return {engine.scheduler.running.request(c.row).handle: c.num_tokens for c in step.chunks}

    assert chunks() == {2: 8, 1: 8}
    engine.add(3, [3] * 40, 2, priority=-1)
    assert chunks() == {3: 8, 2: 8}
    assert chunks() == {3: 8, 2: 8}


def test_waiting_for_long_is_worth_a_level_of_priority() -> None:
    # A level for 10 s. 2 has waited for 15 s when 3 and 4 come: it goes before one level, not two.
    time_s = [0.0]
    engine = Engine(
        policy="priority", priority_aging_s=10.0, max_num_seqs=1, clock=lambda: time_s[0]
    )
    engine.add(1, [1], 3, priority=0)
    engine.step()
    engine.add(2, [2], 1, priority=2)
    engine.step()
    time_s[0] = 15.0
    engine.add(3, [3], 1, priority=1)
    engine.add(4, [4], 1, priority=0)
    assert handles(engine.scheduler.waiting) == [4, 2, 3]
    engine.run()
    assert list(engine.finish_reasons) == [1, 4, 2, 3]


def test_who_has_waited_long_enough_does_not_give_way() -> None:
    time_s = [0.0]
    engine = Engine(
        policy="priority", priority_aging_s=10.0, max_num_seqs=1, clock=lambda: time_s[0]
    )
    engine.add(1, [1], 5, priority=1)
    engine.step()
    for time_s[0], handle, preempted in ((11.0, 2, []), (5.0, 3, [1])):
        engine.add(handle, [handle], 5, priority=0)
        engine.step()
        assert handles(engine.completed.preempted) == preempted


def test_a_group_that_cannot_make_way_keeps_no_other_one_from_it() -> None:
    # 8 blocks of 4, two groups: 1 holds 1 block in the one, 2 holds 5 in the other, 2 are free; 3
    # needs 5, and 1's would be too few.
    engine = Engine(policy="priority", num_blocks=8, block_size=4, max_num_seqs=4, num_groups=2)

    def step(group: int) -> StepPlan:
        engine.deliveries.take(
            engine.scheduler, engine.executor.execute(engine.scheduler.schedule(group))
        )
        return engine.completed

    engine.add(1, [1] * 2, 3, priority=5)
    engine.add(2, [2] * 18, 2, priority=5)
    assert [handles(step(group).new) for group in (0, 1)] == [[1], [2]]
    engine.add(3, [3] * 18, 2, priority=0)
    assert handles(step(0).preempted) == []
    plan = step(1)
    assert (handles(plan.preempted), handles(plan.new)) == ([2], [3])
