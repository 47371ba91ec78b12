"""The unified token-budget scheduler: one kind of step, no prefill or decode phases.

Each request has known tokens and computed tokens; a step lets the second catch up with the first
within a token budget (vLLM V1's scheduler; chunked prefill as in Sarathi-Serve, Agrawal et al.
2024). Decodes take their token first, then running prompts their chunks, then waiting requests are
admitted. When blocks run out, a running request is preempted and recomputed later.

Runs on the step loop's thread. A plan needs token counts only, never the tokens of the step before,
so several steps may be in flight. This file decides who runs; the state of those who do (rows,
tokens, blocks, steps in flight) belongs to the `RunningSet`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.config import SchedulerConfig
from nanocore.engine_core.drafting.proposer import Proposer
from nanocore.engine_core.log.event_log import (
    DraftCounters,
    EngineEvents,
    EntryKind,
    RequestEntry,
    SchedulerCounters,
    StepEntry,
)
from nanocore.engine_core.policy.order import precedence_key
from nanocore.engine_core.policy.step_budget import StepBudget
from nanocore.engine_core.policy.waiting_queue import WaitingQueue
from nanocore.engine_core.requests.readiness import SIBLING, Prerequisite
from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.scheduling.drafter import Drafter
from nanocore.engine_core.scheduling.outputs import ClientOutput, split_by_client
from nanocore.engine_core.scheduling.preemption import Preempter
from nanocore.engine_core.scheduling.room import NO_SHORTAGE, BlockShortage, Room
from nanocore.engine_core.scheduling.running_set import RunningSet
from nanocore.engine_core.scheduling.step_plan import StepOutcome, StepPlan, chunk_limit
from nanocore.engine_core.scheduling.step_result import StepResults
from nanocore.kv_cache import KVCacheManager, Prefix
from nanocore.protocol.messages import Event
from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput


class Scheduler:
    """Decides which tokens of which requests a step computes, and takes its result in.

    `add` and `abort` may be called at any time; `schedule` plans a step, `update` takes in the
    result of the oldest step in flight. An abort between the two wins over the step's result.

    Args:
        config: the limits.
        kv_cache: owned by the scheduler from here on.
        clock: returns seconds, for steps, ageing and the event log.
        proposer: makes what proposes drafts, of the rows' token ids; None: workers do, if any.

    completed: the step whose result came in last. worth_waiting_tokens: how many a request must
    save by waiting for a step that computes them, to wait for it.
    """

    worth_waiting_tokens: ClassVar[int] = 64

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        clock: Callable[[], float] = time.monotonic,
        proposer: Callable[[NDArray[np.int32]], Proposer] | None = None,
    ) -> None:
        self.config = config
        self.kv_cache = kv_cache
        self.precedence = precedence_key(config.policy, config.priority_aging_s)
        self.waiting = WaitingQueue(self.precedence, config.policy == "priority")
        self.log = EngineEvents()
        self.running = RunningSet(config, kv_cache, self.precedence)
        self.room = Room(config, kv_cache, self.running)
        self.preemption = Preempter(config, kv_cache, self.precedence, self.running, self.room)
        self._results = StepResults(self.running)
        self.counters = SchedulerCounters(num_free_rows=config.max_num_seqs)
        self.draft_counters = DraftCounters(accepted_per_pos=[0] * config.num_speculative_tokens)
        self._drafter: Drafter | None = None
        if config.num_speculative_tokens:
            propose = None if proposer is None else proposer(self.running.token_ids)
            limits = config.num_speculative_tokens, config.adaptive_drafts
            self._drafter = Drafter(*limits, self.running, kv_cache, self.draft_counters, propose)
            self.running.follower = self._drafter
        self.budget = StepBudget(config.max_num_batched_tokens, config.target_itl_ms / 1e3)
        self.completed = StepOutcome(StepPlan(0, 0))
        self.clock = clock
        self._begun_s: deque[float] = deque()  # by step in flight
        self._last_update_s = 0.0
        self._requests: dict[int, Request] = {}
        self._unready: dict[int, Request] = {}  # they wait for something outside of the step loop
        self._followers: list[Request] = []  # of the step that is being planned
        self._ended: list[Request] = []  # outside a step's result, since the last update
        self._last_group = 0
        self._num_cache_groups = len(kv_cache.groups)
        self._arrival = (-1, 0.0)  # number of a step, and when the first request before it came
        # Cache groups share slabs, so a request's blocks may lie in more of them than they need,
        # and it may not fit, or fail to grow, though an empty pool would do. Then it runs alone, as
        # compact as it can: without cached blocks of others, and one step after the other.
        self._alone: Request | None = None
        # Why the head did not fit: it is not looked up again while that persists.
        self._head_shortage = NO_SHORTAGE

    @property
    def num_requests(self) -> int:
        """Requests that have not ended, without those that wait for something outside."""
        return len(self._requests)

    @property
    def num_unready(self) -> int:
        """Requests that wait for something outside of the step loop."""
        return len(self._unready)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - len(self.running)

    @property
    def is_stuck(self) -> bool:
        """Whether requests wait although nothing runs, is in flight or was preempted: a bug.

        To be asked right after `schedule`, whose own step is in flight then.
        """
        busy = self.num_running or self.planned.preempted or len(self.running.in_flight) > 1
        return bool(self.waiting) and not busy

    @property
    def planned(self) -> StepPlan:
        """The step that was planned last."""
        return self.running.in_flight[-1].plan

    def next_group(self) -> int | None:
        """Return the group of rows that the next step serves; None if there is nothing to do.

        With one group, steps may be planned while others are in flight (async scheduling). With
        several groups (pipeline stages), and with drafts, a group is in at most one step.
        """
        running = self.running
        if running.in_flight and self._alone is not None and self._alone.row >= 0:
            return None
        if running.may_overlap:
            # With nothing in flight a step is planned whenever somebody is there: if it turns out
            # empty, `is_stuck` detects it.
            if not running.in_flight:
                return 0 if self._requests else None
            return 0 if running.can_go_on or self._can_admit(0) else None
        num_groups, last = self.config.num_groups, self._last_group
        busy = [one.plan.group for one in running.in_flight]
        for group in [(last + i) % num_groups for i in range(1, num_groups + 1)]:
            # Round robin over groups, so that all pipeline stages stay busy.
            if group not in busy and (running.has_work(group) or self._can_admit(group)):
                return group
        return None

    def add(self, request: Request) -> None:
        """Take a request with its sibling samples; it is queued when it waits for nothing.

        Its place in line is that of its arrival, whatever it waits for: see `readiness`.
        """
        num_steps, now_s = self.counters.num_steps, self.clock()
        if self._arrival[0] != num_steps:  # requests of one step are equals
            self._arrival = num_steps, now_s
        for sample in request.samples:
            assert sample.handle not in self._requests
            sample.arrival, sample.arrival_s = self._arrival
            if sample.waits_for and sample.waits_outside:
                self._unready[sample.handle] = sample
            else:
                self._know(sample, now_s)
        if not request.waits_for:
            self.waiting.push(request)

    def ready(self, handle: int, what: Prerequisite) -> None:
        """Let a request wait no longer for this; if that was all, it is queued.

        One that has ended is ignored.
        """
        request = self.find(handle)
        if request is None:
            return
        assert what in request.waits_for, f"{request} does not wait for {what.name}"
        request.waits_for -= {what}
        if handle in self._unready:
            for sample in request.samples:
                if sample.handle in self._unready and not sample.waits_outside:
                    del self._unready[sample.handle]
                    self._know(sample, self.clock())
        if not request.waits_for:
            self.waiting.push(request)

    def find(self, handle: int) -> Request | None:
        """Return the request, unless it has ended."""
        return self._requests.get(handle) or self._unready.get(handle)

    def abort(self, handle: int) -> Request | None:
        """End a request for its client, as `end` does."""
        request = self.end(handle)
        self.counters.num_aborts += request is not None
        return request

    def end(self, handle: int) -> Request | None:
        """End a request wherever it is; returns it, or None if it has ended already."""
        request = self.find(handle)
        if request is None:
            return None
        if request.row < 0:  # it waits, for the first time or after a preemption
            if request in self.waiting:
                self.waiting.remove(request)
            self.counters.count_dequeued(request, self.clock())
        if request.was_queued:
            self._ended.append(request)
        self._end(request)
        return request

    def abort_all(self) -> list[Request]:
        """End every request."""
        handles = [*self._requests, *self._unready]
        return [ended for handle in handles if (ended := self.abort(handle))]

    def schedule(self, group: int = 0) -> SchedulerOutput:
        """Plan the next step, for the group that `next_group` returned.

        Computed counts advance now, not when the result is in: so the next step can be planned
        before this one's result.
        """
        running, counters = self.running, self.counters
        counters.num_steps += 1
        self._begun_s.append(self.clock())
        self.kv_cache.begin_step()
        self._last_group = group
        num_groups, num_cache_groups = self.config.num_groups, self._num_cache_groups
        plan = StepPlan(counters.num_steps, 0, group, num_groups, num_cache_groups)
        # The order matters: first priority preemption, which changes who runs, then running rows,
        # then admission with the budget and blocks that are left, and at last drafts.
        reserved = None
        if (head := self.waiting.head()) is not None:
            reserved = self.preemption.preempt_for(plan, head, self.num_requests)
        num_preempted = len(plan.preempted)
        plan.token_budget = self._token_budget(group)  # it depends on who runs
        budget = running.compute(plan, reserved, self.preemption.make_room)
        # The blocks of rows that `compute` preempted are for running rows: admission could give
        # them back to the preempted. Those that were preempted before made room for the head, which
        # must be admitted.
        may_admit = len(plan.preempted) == num_preempted and not running.is_short_of_blocks
        if plan.preempted and not len(running) and self.kv_cache.has_windows:
            last = plan.preempted[-1]
            if plan.preempters[last.request_id] == last.request_id:
                self._alone = last
        for request in plan.preempted:
            self.waiting.push(request)  # with its old precedence, so it keeps its place in line
            self.log.append(RequestEntry(self.clock(), "preempted", request))
        counters.num_preemptions += len(plan.preempted)
        # Before admission: the siblings may be admitted in the step that completes their prompt.
        for row in plan.completed:
            self._release_siblings(running.request(row))
        if self.waiting and may_admit:
            budget = self._schedule_waiting(plan, budget)
        if self._drafter is not None:
            self._drafter.draft(plan, budget)
        is_full = self.num_waiting > 0 or running.is_short_of_blocks
        counters.count_rows(self.config.max_num_seqs - self.num_running, is_full)
        message = running.begin(plan)
        followers, self._followers = self._followers, []
        for follower in followers:
            self.waiting.push(follower)
        return message

    def update(self, result: ModelRunnerOutput) -> list[ClientOutput]:
        """Take in the result of the oldest step in flight; returns the clients' outputs.

        Raises:
            ValueError: the result does not fit the step.
        """
        now_s = self.clock()
        self.completed = outcome = self._results.accept(result, now_s)
        self.counters.prompt_tokens += outcome.plan.num_prompt_tokens
        self.counters.generation_tokens += len(outcome.tokens.token_ids)
        events: list[tuple[int, Event]] = []
        # In this order: one step may bring a request's first token and its end.
        for request in outcome.started:
            started = Event(handle=request.handle, num_cached_tokens=request.num_cached_tokens)
            events.append((request.client, started))
            is_embedding = request.sampling.pooling is not None
            kind: EntryKind = "embedding" if is_embedding else "first_token"
            self.log.append(RequestEntry(now_s, kind, request))
        for request, ended in outcome.ends:
            events.append((request.client, ended))
            outcome.finished.append(request)
            self._end(request, keeps_blocks=ended.finish_reason != "error")
            self.log.end(request, ended, now_s)
        # The trace reports those that ended otherwise since the last step with this one.
        outcome.finished += self._ended
        self._ended = []
        for row in outcome.plan.completed:  # who has not ended decodes from now on
            if (one := self.running.requests[row]) and row not in outcome.dead_rows:
                self.log.append(RequestEntry(now_s, "decode", one))
        self.counters.count_rows(self.config.max_num_seqs - self.num_running)
        self._log_step(outcome.plan, now_s)
        return split_by_client(outcome.clients, outcome.tokens, events, outcome.prompt_logprobs)

    def _can_admit(self, group: int) -> bool:
        head = self.waiting.head()
        may_fit = head is not None and not self.is_still_blocked(head)
        return may_fit and not self.running.is_short_of_blocks and self.num_admissible(group) > 0

    def num_admissible(self, group: int) -> int:
        """Return how many rows a step of this group may give to waiting requests."""
        return self.room.num_rows(group, self.num_requests)

    def _token_budget(self, group: int) -> int:
        running = self.running
        if not self.budget.has_target or not (self.waiting or running.prefilling):
            return self.config.max_num_batched_tokens
        num_decodes, context = running.decode_load(group)
        # The longest context is assumed for the prompt tokens: an estimate on the safe side.
        prompts = [int(running.num_computed[row]) for row in running.prefilling]
        return self.budget.num_tokens(num_decodes, context, max(prompts, default=0))

    def _schedule_waiting(self, plan: StepPlan, budget: int) -> int:
        """Admit waiting requests while budget, rows and blocks last; none passes the head.

        Returns the budget that is left.
        """
        room, requests = self.room, self.running.requests
        num_rows, alone = self.num_admissible(plan.group), self._alone
        while budget > 0 and num_rows > 0:
            request = self.waiting.head()
            if request is None or self.is_still_blocked(request) or self.is_held_up(request):
                break
            self.kv_cache.is_compact = request is alone
            prefix, num_uncached = room.find_prefix(request, is_cached=request is not alone)
            limit = chunk_limit(self.config, requests, request, plan.chunks)
            count = min(num_uncached, budget, max(limit, 1))  # 1: a limit must not block the queue
            if prefix.num_soon * self.kv_cache.block_size >= self.worth_waiting_tokens:
                # Computing these tokens twice would cost more than the one step that it waits.
                self.waiting.remove(request)
                self._followers.append(request)
            elif room.fits(request, prefix):
                # It leaves the queue first: the queue looks for it by `was_admitted`, which changes
                # with the row. Its session is charged for what it will compute.
                self.waiting.admit(request, num_uncached)
                self._admit(plan, request, prefix, count)
                budget -= count
                num_rows -= 1
                if count == num_uncached:
                    self._release_siblings(request)
            elif prefix.blocks and self.kv_cache.num_free_blocks == self.kv_cache.num_blocks:
                # What it would share lies in more slabs than it needs.
                alone = self._alone = request
            else:
                self._head_shortage = BlockShortage.of(self.kv_cache, request, prefix)
                break
        return budget

    def is_held_up(self, request: Request) -> bool:
        """Whether the head may not be admitted because one of the two has to run alone."""
        alone = self._alone
        return alone is not None and self.num_running > 0 and (request is alone or alone.row >= 0)

    def is_still_blocked(self, request: Request) -> bool:
        """Whether the head did not fit before and cannot fit now, without looking it up again.

        With nothing running it is always tried: a wrong answer here would be a deadlock.
        """
        return self.num_running > 0 and self._head_shortage.persists(self.kv_cache, request)

    def _know(self, request: Request, now_s: float) -> None:
        """Count, log and show a request from now on."""
        self._requests[request.handle] = request
        request.was_queued = True
        self.log.append(RequestEntry(now_s, "queued", request))

    def _release_siblings(self, request: Request) -> None:
        """Queue the samples behind a request whose prompt is planned: they hit its blocks.

        They arrived with it, so they go before everything that arrived later in their session.
        """
        if request.waiting_siblings:
            for sibling in request.release_siblings():
                self.ready(sibling.handle, SIBLING)

    def _admit(self, plan: StepPlan, request: Request, prefix: Prefix, count: int) -> None:
        """Give a waiting request a row and its first tokens."""
        self.counters.count_dequeued(request, self.clock())
        self.running.admit(plan, request, prefix, count)
        self.log.append(RequestEntry(self.clock(), "prefill", request))
        self.preemption.admitted(request)

    def _end(self, request: Request, keeps_blocks: bool = True) -> None:
        """Forget a request. keeps_blocks: False if their content is damaged."""
        if request is self._alone:
            self._alone, self.kv_cache.is_compact = None, False
        if request.row >= 0:
            self.running.leave(request, keeps_blocks)
            self.preemption.removed(request)
        if self._requests.pop(request.handle, None) is None:
            del self._unready[request.handle]
        if request.sampling.n > 1 and (sibling := request.leave_siblings()) is not None:
            self.ready(sibling.handle, SIBLING)

    def _log_step(self, plan: StepPlan, now_s: float) -> None:
        """Log a step, and teach the cost model its duration."""
        # With steps in flight, a step begins to run when the one before it has ended.
        seconds = now_s - max(self._begun_s.popleft(), self._last_update_s)
        self._last_update_s = now_s
        if self.budget.has_target:
            self.budget.observe(plan.num_tokens, plan.context, seconds)
        if self._drafter is not None:
            self._drafter.learn(self.completed, seconds)
        entry = StepEntry(
            plan.number, now_s, seconds, plan.num_decode_tokens, plan.num_prefill_tokens,
            len(self.running), self.num_waiting, self.kv_cache.num_free_blocks,
            len(plan.preempted), len(plan.completed), plan.decode_ends, plan.decode_counts,
            plan.chunks, self.running.times.intervals,
        )  # fmt: skip
        self.log.append(entry)
