"""What must hold of a scheduler at any time, whatever the workload."""

from __future__ import annotations

import numpy as np

from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.worker.plan import SchedulerOutput


def check_plan(scheduler: Scheduler, plan: SchedulerOutput) -> None:
    """What must hold right after `schedule`."""
    config, step, table = scheduler.config, scheduler.planned, scheduler.table
    scheduled = list(step.scheduled())
    assert plan.num_tokens == sum(chunk.num_tokens for chunk in scheduled)
    assert plan.num_tokens <= step.token_budget <= config.max_num_batched_tokens
    assert all(chunk.num_tokens > 0 for chunk in scheduled)
    rows = [chunk.row for chunk in scheduled]
    assert len(set(rows)) == len(rows), "a row is scheduled twice"
    running = {request.row for request in table.running()}
    assert set(rows) <= running
    assert len(running) == scheduler.num_running <= config.max_num_seqs
    exceptions = dict(zip(_ints(plan.chunk_rows), _ints(plan.chunk_counts), strict=True))
    assert exceptions.keys() <= running
    default = {row: int(row % config.num_groups == plan.group) for row in running}
    assert all(count != default[row] for row, count in exceptions.items())
    expected = default | exceptions
    assert {row: count for row, count in expected.items() if count} == {
        chunk.row: chunk.num_tokens for chunk in scheduled
    }
    if plan.num_tokens < step.token_budget:  # nobody is passed by while budget is left
        served = {chunk.row for chunk in scheduled}
        left = table.num_tokens - table.num_computed
        prompts = {r for r in table.prefilling if default[r] or left[r] > 1}
        assert prompts <= served | step.stalled
        decodes = {row for row in table.decoding.tolist() if default[row]}
        assert decodes <= served | step.stalled
        for chunk in step.chunks:
            is_whole = left[chunk.row] == 1 - default[chunk.row]
            assert is_whole or chunk.num_tokens == scheduler.running.max_chunk
    if config.num_groups > 1:  # a group is in one step at most, and no group is crowded
        groups = [in_flight.group for in_flight in scheduler.running.in_flight]
        assert len(set(groups)) == len(groups)
    if config.long_prefill_token_threshold:
        assert all(chunk.num_tokens <= config.long_prefill_token_threshold for chunk in scheduled)
    if config.max_num_partial_prefills:
        assert len(table.prefilling) <= config.max_num_partial_prefills
    assert not (step.preempted and plan.added), "admission in a step that preempted"
    check_rows(scheduler)
    check_blocks(scheduler)


def check_rows(scheduler: Scheduler) -> None:
    """Every running row is at one thing, and its counts are in order."""
    table = scheduler.table
    decoding = table.decoding.tolist()
    at = [*decoding, *table.prefilling, *table.finishing]
    assert sorted(at) == sorted(request.row for request in table.running())
    depth = len(scheduler.running.in_flight)
    for row in at:
        request = table.request(row)
        assert request.row == row
        num_tokens, num_computed = int(table.num_tokens[row]), int(table.num_computed[row])
        assert num_computed <= table.held_tokens[row]
        assert num_computed < request.max_num_tokens, "the last token is never computed"
        # A decoding row may be ahead of its known tokens by the steps in flight.
        num_ahead = max(depth - 1, 0) if scheduler.config.num_groups == 1 else 0
        assert num_computed <= num_tokens + num_ahead
        if row in table.prefilling:
            assert num_computed < num_tokens
    waiting = [request.handle for queue in (scheduler.waiting, scheduler.long_waiting)
               for request in queue]  # fmt: skip
    assert len(waiting) == scheduler.num_waiting == len(set(waiting))
    assert scheduler.num_waiting + scheduler.num_running == scheduler.num_requests


def check_blocks(scheduler: Scheduler) -> None:
    """Reference counts equal the holders; free plus held is all; sharing has a reason."""
    kv_cache, table = scheduler.kv_cache, scheduler.table
    holders = [0] * kv_cache.num_blocks
    owners: dict[int, set[int]] = {}
    for request in table.running():
        block_ids = kv_cache.block_ids(request.handle)
        assert len(block_ids) * kv_cache.block_size == table.held_tokens[request.row]
        assert len(set(block_ids)) == len(block_ids)
        for block_id in block_ids:
            holders[block_id] += 1
            owners.setdefault(block_id, set()).add(request.handle)
    for _, fenced in kv_cache._fenced:
        for block in fenced:
            holders[block.block_id] += 1
    blocks = kv_cache._pool.blocks
    assert [block.ref_count for block in blocks] == holders
    free_ids = kv_cache._pool.free_ids()
    assert len(free_ids) == len(set(free_ids)) == kv_cache.num_free_blocks == holders.count(0)
    for block_id, handles in owners.items():
        if len(handles) > 1:
            positions = {kv_cache.block_ids(handle).index(block_id) for handle in handles}
            assert len(positions) == 1, "shared, but not as the same part of a prefix"
            (position,) = positions
            num_tokens = (position + 1) * kv_cache.block_size
            prefixes = {
                tuple(table.token_ids[request.row, :num_tokens].tolist())
                for request in table.running()
                if request.handle in handles
            }
            assert len(prefixes) == 1, "shared by different prefixes"


def check_idle(scheduler: Scheduler) -> None:
    """Nothing is left of requests that have ended."""
    kv_cache, table = scheduler.kv_cache, scheduler.table
    assert scheduler.num_requests == scheduler.num_waiting == scheduler.num_running == 0
    assert kv_cache.num_free_blocks == kv_cache.num_blocks
    num_groups = scheduler.config.num_groups
    num_free = sum(table.num_free(group) for group in range(num_groups))
    assert num_free == scheduler.config.max_num_seqs
    assert not table.clients
    assert not table._stop_counts.any()
    assert not kv_cache._holdings
    counters = scheduler.counters
    assert counters.dequeued_tokens == counters.prompt_tokens
    assert kv_cache.reset_prefix_cache()
    assert kv_cache.num_cached_blocks == 0


def _ints(column: bytes) -> list[int]:
    return np.frombuffer(column, "<i4").tolist()
