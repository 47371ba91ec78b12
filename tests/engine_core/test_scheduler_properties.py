"""Random workloads against the scheduler's invariants, checked after every step.

The fake worker recomputes every context from its simulated KV memory, so these tests also show that
chunking, preemption, prefix hits and aborts never change a token.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nanocore.engine_core.scheduler import Scheduler
from nanocore.protocol.plan import SchedulerOutput
from tests.fakes import Deliveries, expected_tokens, make_request, make_scheduler

BLOCK_SIZE = 4
MAX_MODEL_LEN = 48


@st.composite
def workloads(draw: st.DrawFn) -> dict:
    """Engine limits, and requests (prompt, max_tokens, arrival step, abort step or None, salt)."""
    needed = -(-MAX_MODEL_LEN // BLOCK_SIZE)
    max_num_seqs = draw(st.integers(1, 6))
    stems = draw(
        st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=3)
    )
    requests = []
    for _ in range(draw(st.integers(1, 10))):
        prompt = draw(st.sampled_from(stems)) + draw(st.lists(st.integers(0, 3), max_size=8))
        requests.append(
            (
                prompt,
                draw(st.integers(1, MAX_MODEL_LEN - len(prompt))),
                draw(st.integers(0, 12)),
                draw(st.none() | st.integers(0, 40)),
                draw(st.sampled_from([None, None, "a"])),
            )
        )
    return {
        "limits": {
            "num_blocks": draw(st.integers(needed, 3 * needed)),
            "block_size": BLOCK_SIZE,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": draw(st.integers(max_num_seqs, 40)),
            "max_model_len": MAX_MODEL_LEN,
            "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 1, 5])),
            "enable_prefix_caching": draw(st.booleans()),
        },
        "requests": requests,
    }


def check_step(scheduler: Scheduler, plan: SchedulerOutput) -> None:
    """What must hold after any `schedule`."""
    config, record, table = scheduler.config, scheduler.record, scheduler.table
    assert plan.num_tokens == record.counts.sum() <= config.max_num_batched_tokens
    assert scheduler.num_running <= config.max_num_seqs
    assert len(set(record.rows.tolist())) == len(record.rows), "a row is scheduled twice"
    chunk_rows = np.frombuffer(plan.chunk_rows, "<i4").tolist()
    chunk_counts = np.frombuffer(plan.chunk_counts, "<i4").tolist()
    assert 1 not in chunk_counts
    assert (record.counts > 0).all()
    assert set(chunk_rows) <= set(table.order.tolist())
    if config.long_prefill_token_threshold:
        assert record.counts.max(initial=0) <= config.long_prefill_token_threshold
    assert not (record.preempted and plan.added), "admission in a step that preempted"
    for row in table.order.tolist():
        assert table.num_computed[row] <= table.num_tokens[row]
        assert table.num_tokens[row] < table.max_num_tokens[row]
        assert table.num_computed[row] <= table.held_tokens[row]
    check_blocks(scheduler)


def check_blocks(scheduler: Scheduler) -> None:
    """Reference counts equal the holders, and free plus held is all."""
    kv_cache, table = scheduler.kv_cache, scheduler.table
    holders = [0] * kv_cache.num_blocks
    keyed: dict[int, set[int]] = {}
    for row in table.order.tolist():
        handle = table.request(row).handle
        block_ids = kv_cache.block_ids(handle)
        assert len(block_ids) * kv_cache.block_size == table.held_tokens[row]
        assert len(set(block_ids)) == len(block_ids)
        for block_id in block_ids:
            holders[block_id] += 1
            keyed.setdefault(block_id, set()).add(handle)
    blocks = kv_cache._pool.blocks
    assert [block.ref_count for block in blocks] == holders
    free_ids = kv_cache._pool.free_ids()
    assert len(free_ids) == len(set(free_ids)) == kv_cache.num_free_blocks == holders.count(0)
    assert all(holders[block_id] == 0 for block_id in free_ids)
    for block_id, owners in keyed.items():
        if len(owners) > 1:
            assert blocks[block_id].key is not None, "shared, but not through the prefix index"


@settings(max_examples=300, deadline=None)
@given(workloads())
def test_every_request_gets_its_tokens_once_and_in_order(workload: dict) -> None:
    scheduler, executor = make_scheduler(**workload["limits"])
    deliveries = Deliveries()
    pending = {
        handle: (prompt, max_tokens, arrival, abort, salt)
        for handle, (prompt, max_tokens, arrival, abort, salt) in enumerate(workload["requests"], 1)
    }
    requests = dict(pending)
    aborted: set[int] = set()
    for step in range(5000):
        for handle, (prompt, max_tokens, arrival, _, salt) in list(pending.items()):
            if arrival <= step:
                del pending[handle]
                scheduler.add(
                    make_request(
                        handle, prompt, max_tokens, block_size=BLOCK_SIZE, cache_salt=salt,
                        max_model_len=MAX_MODEL_LEN,
                    )
                )  # fmt: skip
        if not pending and scheduler.num_requests == 0:
            break
        plan = scheduler.schedule()
        check_step(scheduler, plan)
        assert plan.num_tokens or scheduler.record.preempted or scheduler.num_requests == 0
        result = executor.execute(plan)
        for handle, (*_, abort, _salt) in requests.items():
            # Between execution and update: the abort must win over the step's own result.
            if abort == step and handle not in pending and scheduler.abort(handle):
                aborted.add(handle)
        deliveries.take(scheduler, result)
        check_blocks(scheduler)
    else:
        raise AssertionError("the workload does not end")

    for handle, (prompt, max_tokens, *_) in requests.items():
        expected = expected_tokens(prompt, max_tokens)
        got = deliveries.tokens.get(handle, [])
        if handle in aborted:
            assert got == expected[: len(got)]
            assert handle not in deliveries.finish_reasons
        else:
            assert got == expected
            assert deliveries.finish_reasons[handle] == "length"
    assert scheduler.kv_cache.num_free_blocks == scheduler.kv_cache.num_blocks
    assert scheduler.table.num_free == scheduler.config.max_num_seqs
    assert not scheduler.waiting
    assert scheduler.kv_cache.reset_prefix_cache()
    assert scheduler.kv_cache.num_cached_blocks == 0


@settings(max_examples=60, deadline=None)
@given(workloads())
def test_without_preemption_or_hits_no_token_is_computed_twice(workload: dict) -> None:
    limits = workload["limits"] | {"num_blocks": 200, "enable_prefix_caching": False}
    scheduler, executor = make_scheduler(**limits)
    deliveries = Deliveries()
    for handle, (prompt, max_tokens, *_) in enumerate(workload["requests"], 1):
        scheduler.add(make_request(handle, prompt, max_tokens, max_model_len=MAX_MODEL_LEN))
    while scheduler.num_requests:
        deliveries.step(scheduler, executor)
    # The last token of a request is delivered and never computed.
    expected = sum(len(prompt) + max_tokens - 1 for prompt, max_tokens, *_ in workload["requests"])
    assert executor.num_tokens == expected
