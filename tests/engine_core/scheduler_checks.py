"""What must hold of a scheduler at any time, whatever the workload."""

from __future__ import annotations

from typing import Any

import numpy as np

from nanocore.engine_core.requests.readiness import SIBLING
from nanocore.engine_core.scheduling.scheduler import Scheduler
from nanocore.engine_core.scheduling.step_plan import StepPlan
from nanocore.kv_cache import BlockPool
from nanocore.kv_cache.slab_pool import SlabPool
from nanocore.worker.plan import SchedulerOutput
from tests.fakes import (
    Deliveries,
    FakeExecutor,
    PipelinedExecutor,
    TalliedScheduler,
    make_request,
    make_scheduler,
)
from tests.kv_cache.counts import free_ids


def check_plan(scheduler: Scheduler, plan: SchedulerOutput) -> None:
    """What must hold right after `schedule`."""
    config, step, running_set = scheduler.config, scheduler.planned, scheduler.running
    scheduled = list(step.scheduled())
    assert plan.num_tokens == sum(chunk.num_tokens for chunk in scheduled)
    assert plan.num_tokens <= step.token_budget <= config.max_num_batched_tokens
    assert all(chunk.num_tokens > 0 for chunk in scheduled)
    rows = [chunk.row for chunk in scheduled]
    assert len(set(rows)) == len(rows), "a row is scheduled twice"
    running = {request.row for request in running_set}
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
        left = {row: num_left(scheduler, row) for row in running}
        prompts = {r for r in running_set.prefilling if default[r] or left[r] > 1}
        after_kept = _rows_after_kept(scheduler)
        prompts -= after_kept
        assert prompts <= served | step.stalled
        decodes = {row for row in running_set.decoding.tolist() if default[row]}
        assert decodes <= served | step.stalled
        for chunk in step.chunks:
            is_whole = left[chunk.row] == 1 - default[chunk.row]
            is_cut = chunk.row in after_kept
            assert is_whole or is_cut or chunk.num_tokens == scheduler.config.max_chunk
    if not running_set.may_overlap:  # a group is in one step at most
        groups = [one.plan.group for one in running_set.in_flight]
        assert len(set(groups)) == len(groups)
    if config.long_prefill_token_threshold:
        assert all(c.num_tokens <= config.long_prefill_token_threshold for c in step.chunks)
    assert all(
        n <= 1 + config.num_speculative_tokens for _, n, _ in scheduled[: len(step.decoding)]
    )
    if step.preempted and plan.added:
        first = running_set.request(plan.added[0].row)
        assert config.policy == "priority", "admission in a step that preempted"
        assert all(one.priority > first.priority for one in step.preempted)
    check_urgency(scheduler)
    check_rows(scheduler)
    check_blocks(scheduler)


def _rows_after_kept(scheduler: Scheduler) -> set[int]:
    """Rows that go after one for whom a part of the step's budget may have been kept.

    Who was admitted needs less than that if the step itself computes more of its prefix.
    """
    step, running_set, head = scheduler.planned, scheduler.running, scheduler.waiting.head()
    if scheduler.config.policy != "priority":
        return set()
    urgent = [*step.new, *step.resumed, *([head] if head is not None else [])]
    first = min(map(scheduler.precedence, urgent), default=None)
    return {
        one.row for one in running_set if first is not None and scheduler.precedence(one) > first
    }


def check_urgency(scheduler: Scheduler) -> None:
    """Who waits although the step had tokens does so behind nobody of lower priority in its group.

    Unless another one was admitted, for a step makes way for one, or it is a sample of a prompt
    that this step completes, or blocks are about to be free, or all that such hold were not enough,
    or chunks are limited, or running rows took blocks that it would have had, perhaps with its
    prefix in them: the next step makes way.
    """
    config, step, kv_cache = scheduler.config, scheduler.planned, scheduler.kv_cache
    running_set, head = scheduler.running, scheduler.waiting.head()
    if config.policy != "priority" or head is None or len(scheduler.running.in_flight) > 1:
        return
    if step.new or step.resumed or step.completed or step.preempted or step.stalled:
        return
    if config.watermark:
        return
    own = [one for one in running_set if one.row % config.num_groups == step.group]
    below = [one for one in own if one.priority > head.priority]
    if step.blocks or kv_cache.can_allocate(head.handle, head.num_tokens):
        return
    if below and step.num_tokens < step.token_budget:
        released = [one.handle for one in below]
        assert not kv_cache.can_allocate(head.handle, head.num_tokens, released=released)


def num_left(scheduler: Scheduler, row: int) -> int:
    """Tokens known of a row that are not computed."""
    running = scheduler.running
    return len(running.known_tokens(row)) - running.num_computed[row]


def check_rows(scheduler: Scheduler) -> None:
    """Every running row is at one thing, and its counts are in order."""
    running, config, kv_cache = scheduler.running, scheduler.config, scheduler.kv_cache
    decoding = running.decoding.tolist()
    at = [*decoding, *running.prefilling, *running.finishing]
    assert sorted(at) == sorted(request.row for request in running)
    groups_in_flight = {one.plan.group for one in running.in_flight}
    for row in at:
        request = running.request(row)
        assert request.row == row
        num_tokens, num_computed = (
            len(running.known_tokens(row)),
            running.num_computed[row],
        )
        held_tokens = int(running.held_tokens[row])
        assert num_computed <= held_tokens
        if not kv_cache.groups[0].window:
            assert held_tokens == len(kv_cache.block_ids(request.handle)) * kv_cache.block_size
        assert num_tokens <= request.max_num_tokens
        assert num_computed < request.max_num_tokens, "the last token is never computed"
        assert request.token_ids is None, "its tokens are the running set's"
        is_in_flight = row % config.num_groups in groups_in_flight
        if row in running.prefilling:
            assert num_computed < num_tokens
        elif running.may_overlap:  # ahead of the known tokens by the steps in flight
            assert num_computed <= num_tokens + max(len(running.in_flight) - 1, 0)
        elif is_in_flight:  # ahead by the drafts
            assert num_computed <= num_tokens + config.num_speculative_tokens
        else:  # what was not accepted is taken back
            assert num_computed == num_tokens - 1
    waiting = [request.handle for request in scheduler.waiting]
    assert all(one.num_tokens >= one.num_prompt_tokens for one in scheduler.waiting)
    assert len(waiting) == len(scheduler.waiting) == len(set(waiting))
    for request in scheduler.waiting:
        assert not request.waits_for
    check_samples(scheduler, waiting)
    assert scheduler.num_waiting + scheduler.num_running == scheduler.num_requests


def check_samples(scheduler: Scheduler, waiting: list[int]) -> None:
    """Who is held back is so by one whose prompt is not all planned, and by no other."""
    running = scheduler.running
    leaders = [*list(running), *scheduler.waiting]
    leaders += [one for one in scheduler._unready.values() if SIBLING not in one.waits_for]
    waiting_siblings = [sample for leader in leaders for sample in leader.waiting_siblings]
    for leader in leaders:
        assert leader.awaited_sibling is None
        assert all(sample.awaited_sibling is leader for sample in leader.waiting_siblings)
        if leader.waiting_siblings and leader.row >= 0:
            assert leader.row in running.prefilling, "its prompt is planned"
    handles = [sample.handle for sample in waiting_siblings]
    assert len(set(handles)) == len(handles)
    assert not set(handles).intersection(waiting)
    for sample in waiting_siblings:
        assert sample.row < 0
        assert not sample.waiting_siblings
        assert SIBLING in sample.waits_for
        assert sample.waits_outside == (sample.handle in scheduler._unready)
    num_behind = sum(not sample.waits_outside for sample in waiting_siblings)
    assert scheduler.num_waiting == len(scheduler.waiting) + num_behind


def check_blocks(scheduler: Scheduler) -> None:
    """Reference counts equal the holders; free plus held is all; sharing has a reason."""
    kv_cache, running = scheduler.kv_cache, scheduler.running
    for group, pool in enumerate(kv_cache.pools):
        check_group(scheduler, group, pool)
    if len(kv_cache.pools) == 1 and not kv_cache.groups[0].window:
        free = free_ids(kv_cache.pool)
        num_held = sum(block.ref_count > 0 for block in kv_cache.pool.blocks)
        assert len(free) == len(set(free)) == kv_cache.num_free_blocks
        assert len(free) + num_held == kv_cache.num_blocks
    if not len(running.in_flight) and not len(running):
        assert kv_cache.num_free_blocks == kv_cache.num_blocks


def check_group(scheduler: Scheduler, group: int, pool: BlockPool | SlabPool) -> None:
    kv_cache, running = scheduler.kv_cache, scheduler.running
    window, block_size = kv_cache.groups[group].window, kv_cache.block_size
    is_state = kv_cache.groups[group].spacing > 0  # it has no block for each token
    holders = [0] * len(pool.blocks)
    owners: dict[int, set[int]] = {}
    first: dict[int, int] = {}
    for request in running:
        block_ids = kv_cache.block_ids(request.handle, group)
        end = int(running.held_tokens[request.row]) // block_size
        first[request.handle] = end - len(block_ids)
        # What the next token sees is held, and what no token sees any more only until the row
        # crosses into its next block.
        num_seen = max(int(running.num_computed[request.row]) - window + 1, 0) // block_size
        assert is_state or first[request.handle] <= (num_seen if window else 0)
        assert len(set(block_ids)) == len(block_ids)
        for block_id in block_ids:
            holders[block_id] += 1
            owners.setdefault(block_id, set()).add(request.handle)
    fenced = [b for _, left in kv_cache._fenced for of, own, _ in left if of is pool for b in own]
    for block in fenced:
        holders[block.block_id] += 1
    assert [block.ref_count for block in pool.blocks] == holders
    for block_id, handles in owners.items():
        if len(handles) > 1 and not is_state:
            positions = {
                first[one] + kv_cache.block_ids(one, group).index(block_id) for one in handles
            }
            assert len(positions) == 1, "shared, but not as the same part of a prefix"
            (position,) = positions
            num_tokens = (position + 1) * kv_cache.block_size
            prefixes = {
                tuple(running.known_tokens(request.row)[:num_tokens].tolist())
                for request in running
                if request.handle in handles
            }
            assert len(prefixes) == 1, "shared by different prefixes"


def check_idle(scheduler: Scheduler) -> None:
    """Nothing is left of requests that have ended."""
    kv_cache, running = scheduler.kv_cache, scheduler.running
    assert scheduler.num_requests == scheduler.num_waiting == scheduler.num_running == 0
    assert scheduler.num_unready == 0
    assert kv_cache.num_free_blocks == kv_cache.num_blocks
    num_groups = scheduler.config.num_groups
    num_free = sum(running.row_counts(group)[1] for group in range(num_groups))
    assert num_free == scheduler.config.max_num_seqs
    assert not running.clients
    assert not running.stop_ids.counts.any()
    assert not kv_cache._holdings
    assert isinstance(scheduler, TalliedScheduler)
    assert scheduler.counters.dequeued_tokens == scheduler.num_added_tokens
    assert not running.logprob_rows
    assert not running.prompt_logprob_rows
    assert not running.matchers
    assert kv_cache.reset_prefix_cache()
    assert kv_cache.num_cached_blocks == 0


def _ints(column: bytes) -> list[int]:
    return np.frombuffer(column, "<i4").tolist()


class Engine:
    """A scheduler with its fake worker, and what clients got; each step is checked."""

    def __init__(self, **limits: Any) -> None:
        self.scheduler, self.executor = make_scheduler(**limits)
        self.deliveries = Deliveries()
        self.tokens = self.deliveries.tokens
        self.finish_reasons = self.deliveries.finish_reasons
        self.num_cached = self.deliveries.num_cached

    @property
    def completed(self) -> StepPlan:
        """Plan of the last step."""
        return self.scheduler.completed.plan

    def add(self, handle: int, prompt: list[int], max_tokens: int = 4, **more: Any) -> None:
        self.scheduler.add(make_request(handle, prompt, max_tokens, **more))

    def step(self) -> SchedulerOutput:
        plan = self.scheduler.schedule(self.scheduler.next_group() or 0)
        check_plan(self.scheduler, plan)
        assert not self.scheduler.is_stuck
        self.deliveries.take(self.scheduler, self.executor.execute(plan))
        check_rows(self.scheduler)
        check_blocks(self.scheduler)
        return plan

    def run(self) -> None:
        """Until all requests have ended; what is cached stays."""
        while self.scheduler.num_requests:
            self.step()

    def finish(self) -> None:
        """Until all requests have ended, and nothing is left of them."""
        self.run()
        check_idle(self.scheduler)


def run(scheduler: Scheduler, executor: FakeExecutor, depth: int = 1) -> Deliveries:
    """Until all requests have ended; each plan is checked, and that nothing is left."""
    worker, deliveries = PipelinedExecutor(executor), Deliveries()
    while scheduler.num_requests or len(worker):
        while len(worker) < depth and (group := scheduler.next_group()) is not None:
            plan = scheduler.schedule(group)
            check_plan(scheduler, plan)
            worker.submit(plan)
        deliveries.take(scheduler, worker.collect())
    check_idle(scheduler)
    return deliveries
