"""The scheduler's rules, each with worked numbers."""

from __future__ import annotations

import numpy as np

from nanocore.worker.plan import SchedulerOutput
from tests.engine_core.scheduler_checks import Engine
from tests.fakes import Deliveries, expected_tokens, make_request, make_scheduler


def counts(plan: SchedulerOutput) -> dict[int, int]:
    """The plan's exceptions: token count by row."""
    rows = np.frombuffer(plan.chunk_rows, "<i4").tolist()
    return dict(zip(rows, np.frombuffer(plan.chunk_counts, "<i4").tolist(), strict=True))


def test_a_steady_decode_step_is_described_by_nothing() -> None:
    engine = Engine(block_size=16)
    for handle in (1, 2, 3):
        engine.add(handle, [handle] * 5, 8, block_size=16)
    engine.step()
    plan = engine.step()
    assert plan.num_tokens == 3
    assert not plan.added
    assert plan.removed_rows == plan.chunk_rows == plan.chunk_counts == b""
    assert plan.block_rows == plan.block_ids == b""


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    engine = Engine(max_num_batched_tokens=10)
    engine.add(1, list(range(25)), 2)
    sizes = [engine.step().num_tokens for _ in range(4)]
    assert sizes == [10, 10, 5, 1]
    assert engine.tokens[1] == expected_tokens(list(range(25)), 2)
    assert engine.scheduler.num_requests == 0


def test_running_requests_take_the_budget_before_waiting_ones() -> None:
    engine = Engine(max_num_batched_tokens=10)
    engine.add(1, [1] * 4, 8)
    engine.step()
    engine.add(2, [2] * 30, 8)
    plan = engine.step()
    assert plan.num_tokens == 10
    assert counts(plan) == {1: 9}  # row 0 decodes


def test_a_long_prefill_threshold_leaves_budget_to_others() -> None:
    scheduler, executor = make_scheduler(max_num_batched_tokens=20, long_prefill_token_threshold=8)
    scheduler.add(make_request(1, [1] * 30, 2))
    scheduler.add(make_request(2, [2] * 5, 2))
    plan = Deliveries().step(scheduler, executor)
    assert counts(plan) == {0: 8, 1: 5}


def test_the_head_of_the_queue_is_never_passed_by() -> None:
    engine = Engine(num_blocks=8, block_size=4)
    engine.add(1, [1] * 16, 3)
    engine.step()
    engine.add(2, [2] * 20, 2)  # 5 blocks; 4 or fewer are free
    engine.add(3, [3] * 2, 2)
    engine.step()
    assert engine.scheduler.num_running == 1  # request 3 would fit, and waits
    engine.run()
    assert list(engine.finish_reasons) == [1, 2, 3]


def test_duplicates_admitted_in_one_step_share_blocks() -> None:
    engine = Engine(block_size=4)
    prompt = list(range(10))
    for handle in (1, 2, 3):
        engine.add(handle, prompt, 3)
    plan = engine.step()
    assert plan.num_tokens == 10 + 2 + 2
    assert engine.num_cached == {1: 0, 2: 8, 3: 8}
    engine.run()
    assert {tuple(tokens) for tokens in engine.tokens.values()} == {
        tuple(expected_tokens(prompt, 3))
    }


def test_a_second_turn_hits_prompt_and_answer_but_the_tail() -> None:
    engine = Engine(block_size=4)
    first = list(range(10))
    engine.add(1, first, 7)
    engine.run()
    second = first + engine.tokens[1] + [1, 2, 3]
    engine.add(2, second, 1)
    engine.step()
    assert engine.num_cached[2] == 16  # 17 tokens known, of which 16 computed


def test_any_of_several_stop_ids_ends() -> None:
    prompt = [3, 1, 4]
    tokens = expected_tokens(prompt, 12)
    stop = tokens[5]
    for kind in ({"stop_token_ids": (9999, stop)}, {"eos": (9999, stop)}):
        scheduler, executor = make_scheduler()
        deliveries = Deliveries()
        scheduler.add(make_request(1, prompt, 12, **kind))
        while scheduler.num_requests:
            deliveries.step(scheduler, executor)
        assert deliveries.tokens[1] == expected_tokens(prompt, 12, (stop,))
        assert deliveries.finish_reasons[1] == "stop"


def test_a_request_ends_at_the_models_length() -> None:
    engine = Engine(max_model_len=16)
    engine.add(1, [1] * 15, 100, max_model_len=16)
    engine.step()
    assert engine.finish_reasons == {1: "length"}
    assert len(engine.tokens[1]) == 1


def test_abort_while_waiting_mid_chunk_and_decoding_frees_everything() -> None:
    engine = Engine(max_num_batched_tokens=8, max_num_seqs=2)
    engine.add(1, [1] * 4, 50)
    engine.add(2, [2] * 40, 50)
    engine.add(3, [3] * 4, 50)
    engine.step()
    engine.step()
    assert (engine.scheduler.num_running, len(engine.scheduler.waiting)) == (2, 1)
    for handle in (3, 2, 1):
        assert engine.scheduler.abort(handle) is not None
        assert engine.scheduler.abort(handle) is None
    assert engine.scheduler.kv_cache.num_free_blocks == engine.scheduler.kv_cache.num_blocks
    plan = engine.step()
    assert plan.num_tokens == 0
    assert engine.executor.rows == {}


def test_different_salts_share_nothing() -> None:
    engine = Engine(block_size=4)
    for handle, salt in ((1, "a"), (2, "b"), (3, "a"), (4, None)):
        engine.add(handle, list(range(10)), 2, cache_salt=salt)
    engine.step()
    assert engine.num_cached == {1: 0, 2: 0, 3: 8, 4: 0}


def test_a_stop_token_in_the_last_place_is_a_stop_not_a_length() -> None:
    prompt = [3, 1, 4]
    tokens = expected_tokens(prompt, 12)
    num_outputs = next(i for i in range(2, 12) if tokens[i] not in tokens[:i]) + 1
    engine = Engine()
    engine.add(1, prompt, num_outputs, eos=(tokens[num_outputs - 1],))
    engine.run()
    assert engine.tokens[1] == tokens[:num_outputs]
    assert engine.finish_reasons[1] == "stop"


def test_a_lone_clients_last_output_is_addressed_to_it() -> None:
    scheduler, executor = make_scheduler()
    scheduler.add(make_request(1, [1], 2, client=7))
    for _ in range(2):
        outputs = scheduler.update(executor.execute(scheduler.schedule()))
        assert [(o.client, o.tokens.owners.tolist()) for o in outputs] == [(7, [1])]
    assert [event.finish_reason for event in outputs[0].events] == ["length"]


def test_generation_tokens_are_those_delivered_not_those_of_aborted_requests() -> None:
    scheduler, executor = make_scheduler()
    scheduler.add(make_request(1, [1], 9))
    scheduler.add(make_request(2, [2], 9))
    result = executor.execute(scheduler.schedule())
    scheduler.abort(2)
    scheduler.update(result)
    assert scheduler.counters.generation_tokens == 1


def test_prompt_tokens_count_with_the_result_of_the_step_that_computed_them() -> None:
    engine = Engine(max_num_batched_tokens=8, num_blocks=16, block_size=4)
    engine.add(1, list(range(18)), 2)
    engine.add(2, list(range(18)), 2)  # 16 of its tokens are found
    counted = []
    while engine.scheduler.num_requests:
        counted.append(engine.scheduler.counters.prompt_tokens)
        engine.step()
    assert counted == [0, 8, 16, 20]
    assert engine.scheduler.counters.prompt_tokens == 20


def test_a_preempted_requests_prompt_counts_again_but_not_its_outputs() -> None:
    engine = Engine(num_blocks=8, block_size=4, enable_prefix_caching=False)
    for handle in (1, 2):
        engine.add(handle, [handle] * 8, 12)
    engine.run()
    assert engine.scheduler.counters.num_preemptions == 1
    assert engine.scheduler.counters.prompt_tokens == 3 * 8


def test_hits_of_a_resumed_request_are_kept_apart_and_not_told_as_its_cached_tokens() -> None:
    # 10 blocks of 4, chunks of 4. 1 and 2 cross into a second block in step 2 and a third in step
    # 6, their last. 3 computes 4 of its 24 tokens in each of steps 2 to 5. In step 6 all want 11
    # blocks, and 3 goes; its 4 full blocks are found again in step 7.
    engine = Engine(num_blocks=10, block_size=4, long_prefill_token_threshold=4)
    engine.add(1, [1] * 4, 6)
    engine.add(2, [2] * 4, 6)
    engine.step()
    prompt = list(range(24))
    engine.add(3, prompt, 2)
    for _ in range(5):
        engine.step()
    assert [request.handle for request in engine.completed.preempted] == [3]
    engine.step()
    assert [request.handle for request in engine.completed.resumed] == [3]
    assert engine.completed.cached == {"r3": 16}
    engine.run()
    assert engine.num_cached == {1: 0, 2: 0, 3: 0}
    assert engine.tokens[3] == expected_tokens(prompt, 2)
    stats = engine.scheduler.kv_cache.stats
    assert (stats.queries, stats.hits) == (4 + 4 + 24, 0), "the first admissions'"


def test_the_stop_reason_is_the_stop_id_and_none_for_eos() -> None:
    prompt = [3, 1, 4]
    (token,) = expected_tokens(prompt, 1)
    for kind, reason in (({"stop_token_ids": (token,)}, token), ({"eos": (token,)}, None)):
        scheduler, executor = make_scheduler()
        scheduler.add(make_request(1, prompt, 9, **kind))  # type: ignore[arg-type]
        (output,) = scheduler.update(executor.execute(scheduler.schedule()))
        ended = output.events[-1]
        assert (ended.finish_reason, ended.stop_reason) == ("stop", reason)


def test_blocks_filled_by_outputs_are_found_while_their_request_still_runs() -> None:
    # 3 prompt tokens and 5 outputs fill two blocks of 4; step 7 computes token 9, past them.
    engine = Engine(block_size=4)
    engine.add(1, [7] * 3, 20)
    for _ in range(7):
        engine.step()
    engine.add(2, [7] * 3 + engine.tokens[1][:6], 1)
    engine.step()
    assert engine.num_cached == {1: 0, 2: 8}
