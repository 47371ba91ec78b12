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
from typing import Final

from nanocore.engine_core.config import SchedulerConfig
from nanocore.engine_core.policy.order import NO_SHORTAGE, BlockShortage, Precedence, precedence_key
from nanocore.engine_core.policy.step_budget import StepBudget, chunk_limit
from nanocore.engine_core.policy.waiting_queue import WaitingQueue
from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.requests.step_log import SchedulerCounters, StepLog
from nanocore.engine_core.scheduling.outputs import ClientOutput, split_by_client
from nanocore.engine_core.scheduling.priority_preemption import Need, PriorityPreemption
from nanocore.engine_core.scheduling.running_set import RunningSet
from nanocore.engine_core.scheduling.step_plan import StepOutcome, StepPlan
from nanocore.kv_cache import Block, KVCacheManager
from nanocore.protocol.messages import Event
from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput

_NUM_ARRIVALS: Final = 1024
"""Steps whose arrival times are kept, for requests that join late since a grammar is compiled."""


class Scheduler:
    """Decides which tokens of which requests a step computes, and takes its result in.

    `add` and `abort` may be called at any time; `schedule` plans a step, `update` takes in the
    result of the oldest step in flight. An abort between the two wins over the step's result.

    Args:
        config: the limits.
        kv_cache: owned by the scheduler from here on.
        clock: returns seconds, for steps, ageing and the step log.

    completed: the step whose result came in last.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.kv_cache = kv_cache
        self.precedence = precedence_key(config.policy, config.priority_aging_s)
        self.waiting = WaitingQueue(self.precedence, config.policy == "priority")
        self.step_log = StepLog()
        self.running = RunningSet(config, kv_cache, self.precedence, self.step_log)
        self._priority_preemption: PriorityPreemption | None = None
        if config.policy == "priority":
            preemption = PriorityPreemption(self.running, kv_cache, config.num_groups)
            self._priority_preemption = preemption
        self.counters = SchedulerCounters(num_free_rows=config.max_num_seqs)
        self.budget = StepBudget(config.max_num_batched_tokens, config.target_itl_ms / 1e3)
        self.completed = StepOutcome(StepPlan(0, 0))
        self.clock = clock
        self._begun_s: deque[float] = deque()  # by step in flight
        self._last_update_s = 0.0
        self._requests: dict[int, Request] = {}
        self._ended: list[Request] = []  # outside a step's result, since the last update
        self._last_group = 0
        self._arrivals_s: dict[int, float] = {}  # by step number: when its first request arrived
        # Why the head did not fit: it is not looked up again while that persists.
        self._head_shortage = NO_SHORTAGE
        # By group: a head for which priority preemption could not free enough.
        self._failed_preemption: dict[int, BlockShortage] = {}
        self._watermark_blocks = int(config.watermark * kv_cache.num_blocks)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def open_requests(self) -> list[Request]:
        """Return the requests that have not ended, by arrival. Any thread may call this."""
        return list(self._requests.values())

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
        busy = self.num_running or self.planned.preempted or self.running.num_in_flight > 1
        return bool(self.waiting) and not busy

    @property
    def planned(self) -> StepPlan:
        """The step that was planned last."""
        return self.running.planned

    def next_group(self) -> int | None:
        """Return the group of rows that the next step serves; None if there is nothing to do.

        With one group, steps may be planned while others are in flight (async scheduling). With
        several groups (pipeline stages), and with drafts, a group is in at most one step.
        """
        running = self.running
        if running.may_overlap:
            # With nothing in flight a step is planned whenever somebody is there: if it turns out
            # empty, `is_stuck` detects it.
            if not running.num_in_flight:
                return 0 if self._requests else None
            return 0 if running.can_go_on or self._can_admit(0) else None
        num_groups, last, busy = self.config.num_groups, self._last_group, running.groups_in_flight
        for group in [(last + i) % num_groups for i in range(1, num_groups + 1)]:
            # Round robin over groups, so that all pipeline stages stay busy.
            if group not in busy and (running.has_work(group) or self._can_admit(group)):
                return group
        return None

    def add(self, request: Request, arrival: int | None = None) -> None:
        """Queue a request; its sibling samples wait behind it, see `WaitingQueue`.

        arrival: the step number at its SUBMIT, if its grammar had to be compiled since. It keeps
            the place in line of that time, and ages from then on.
        """
        now_s = self.clock()
        arrival_s = now_s if arrival is None else request.received_s
        arrival = self.counters.num_steps if arrival is None else arrival
        # Requests of one step are equals: they share the arrival time of the first.
        arrival_s = self._arrivals_s.setdefault(arrival, arrival_s)
        if len(self._arrivals_s) > _NUM_ARRIVALS:
            del self._arrivals_s[next(iter(self._arrivals_s))]
        for sample in request.samples:
            assert sample.handle not in self._requests
            self._requests[sample.handle] = sample
            sample.arrival, sample.arrival_s = arrival, arrival_s
            sample.times.queued_s = now_s
            sample.times.enter("queued", sample.received_s or now_s)
        self.waiting.push(request)

    def abort(self, handle: int) -> Request | None:
        """End a request for its client, as `end` does."""
        request = self.end(handle)
        self.counters.num_aborts += request is not None
        return request

    def end(self, handle: int) -> Request | None:
        """End a request wherever it is; returns it, or None if it has ended already."""
        request = self._requests.get(handle)
        if request is None:
            return None
        if request.row < 0:  # it waits, for the first time or after a preemption
            self.waiting.leave(request)
            self.counters.count_dequeued(request, self.clock())
        self._ended.append(request)
        self._end(request)
        return request

    def abort_all(self) -> list[Request]:
        """End every request."""
        return [ended for handle in list(self._requests) if (ended := self.abort(handle))]

    def schedule(self, group: int = 0) -> SchedulerOutput:
        """Plan the next step, for the group that `next_group` returned.

        Computed counts advance now, not when the result is in: so the next step can be planned
        before this one's result.
        """
        running, counters = self.running, self.counters
        counters.num_steps += 1
        self._last_group = group
        # The order matters: first priority preemption, which changes who runs, then running rows,
        # then admission with the budget and blocks that are left.
        head = self.waiting.head(self._may_be_partial)
        preempted, reserved = self._preempt_for_head(head, group)
        token_budget = self._token_budget(group)
        plan, budget = running.compute(counters.num_steps, group, token_budget, reserved)
        # The blocks of rows that `compute` preempted are for running rows: admission could give
        # them back to the preempted. Asked before those are added that were preempted for the head,
        # which must be admitted.
        may_admit = not plan.preempted and not running.is_short_of_blocks
        plan.preempt_first(preempted, head)
        for request in plan.preempted:
            self.waiting.push(request)  # with its old precedence, so it keeps its place in line
            request.times.preempt(self.clock())
            if self._priority_preemption is not None:
                self._priority_preemption.removed(request)
        counters.num_preemptions += len(plan.preempted)
        # Before admission: the siblings may be admitted in the step that completes their prompt.
        for row in plan.completed:
            self.waiting.release_siblings(running.table.request(row))
        if self.waiting and may_admit:
            self._schedule_waiting(plan, budget)
        self._begun_s.append(self.clock())
        is_full = self.num_waiting > 0 or running.is_short_of_blocks
        counters.count_rows(self.config.max_num_seqs - self.num_running, is_full)
        return running.begin(plan)

    def update(self, result: ModelRunnerOutput) -> list[ClientOutput]:
        """Take in the result of the oldest step in flight; returns the clients' outputs.

        Raises:
            ValueError: the result does not fit the step.
        """
        now_s = self.clock()
        self.completed = outcome = self.running.accept(result, now_s)
        self.counters.prompt_tokens += outcome.plan.num_prompt_tokens
        self.counters.generation_tokens += len(outcome.tokens.token_ids)
        events: list[tuple[int, Event]] = []
        # In this order: one step may bring a request's first token and its end.
        for request in outcome.started:
            started = Event(handle=request.handle, num_cached_tokens=request.num_cached_tokens)
            events.append((request.client, started))
            self.step_log.begin(request, now_s)
        for request, ended in outcome.ends:
            events.append((request.client, ended))
            outcome.finished.append(request)
            self._end(request, keeps_blocks=ended.finish_reason != "error")
            self.step_log.end(request, ended, now_s)
        # The trace reports those that ended otherwise since the last step with this one.
        outcome.finished += self._ended
        self._ended = []
        outcome.begin_decodes(self.running.table.requests, now_s)
        self.counters.count_rows(self.config.max_num_seqs - self.num_running)
        self._log(outcome.plan, now_s)
        return split_by_client(outcome.clients, outcome.tokens, events, outcome.prompt_logprobs)

    def _can_admit(self, group: int) -> bool:
        head = self.waiting.head(self._may_be_partial)
        may_fit = head is not None and not self.is_still_blocked(head)
        return may_fit and not self.running.is_short_of_blocks and self.num_admissible(group) > 0

    def num_admissible(self, group: int) -> int:
        """Return how many rows a step of this group may give to waiting requests.

        Groups stay equally large.
        """
        num_taken, num_free = self.running.table.row_counts(group)
        # Without a share, one pipeline group would take all requests while the others idle.
        fair_share = -(-self.num_requests // self.config.num_groups)
        return min(num_free, fair_share - num_taken)

    def _token_budget(self, group: int) -> int:
        running = self.running
        if not self.budget.has_target or not (self.waiting or running.table.prefilling):
            return self.config.max_num_batched_tokens
        num_decodes, context = running.decode_load(group)
        # The longest context is assumed for the prompt tokens: an estimate on the safe side.
        prompts = [int(running.table.num_computed[row]) for row in running.table.prefilling]
        return self.budget.num_tokens(num_decodes, context, max(prompts, default=0))

    def _preempt_for_head(
        self, head: Request | None, group: int
    ) -> tuple[list[Request], tuple[Precedence, int] | None]:
        """Preempt lower priorities for the head of the queue, if that lets it be admitted.

        With steps in flight the victims' blocks are fenced: then the head is admitted by a later
        step, and until then `_failed_preemption` stays as it is, so this is tried again.

        Returns (preempted requests, (precedence, tokens) to reserve of the budget for the head).
        """
        preemption = self._priority_preemption
        if preemption is None or head is None or not preemption.may_preempt_for(head, group):
            return [], None
        failed = self._failed_preemption.get(group, NO_SHORTAGE)
        is_same = failed.num_free_blocks == self.kv_cache.num_free_blocks
        if is_same and failed.persists(self.kv_cache, head):
            return [], None
        hits = self._find_prefix(head)
        num_uncached = head.num_tokens - len(hits) * self.kv_cache.block_size
        count = min(num_uncached, chunk_limit(self.config, self.running.table, head, ()))
        if count < num_uncached and not self._may_be_partial:
            return [], None  # the partial-prefill limit will defer it

        def need() -> Need:  # anew after each preemption, which changes all of it
            num_blocks = self.kv_cache.num_free_needed(head.handle, head.num_tokens, hits)
            return Need(self.num_admissible(group) > 0, num_blocks + self._num_reserved_blocks)

        preempted = preemption.preempt_for(head, group, need)
        is_admitted = need().has_row and self._fits(head, hits)
        if not (preempted or is_admitted):
            self._failed_preemption[group] = BlockShortage.of(self.kv_cache, head, hits)
        reserved = (self.precedence(head), count) if is_admitted else None
        return preempted, reserved

    def _schedule_waiting(self, plan: StepPlan, budget: int) -> None:
        """Admit waiting requests while budget, rows and blocks last; none passes the head.

        Except for the partial-prefill limit: a prompt of several chunks is deferred while as many
        as the limit are running, and those behind it go on.
        """
        num_rows = self.num_admissible(plan.group)
        while budget > 0 and num_rows > 0:
            request = self.waiting.head(self._may_be_partial)
            if request is None or self.is_still_blocked(request):
                return
            hits = self._find_prefix(request)
            num_uncached = request.num_tokens - len(hits) * self.kv_cache.block_size
            limit = chunk_limit(self.config, self.running.table, request, plan.chunks)
            count = min(num_uncached, budget, max(limit, 1))  # 1: a limit must not block the queue
            if count < num_uncached and not self._may_be_partial:
                if num_uncached <= chunk_limit(self.config, self.running.table, request, ()):
                    return  # a later step has the budget for all of it
                self.waiting.defer(request)
            elif self._fits(request, hits):
                # It leaves the queue first: the queue looks for it by `was_admitted`, which changes
                # with the row. Its session is charged for what it will compute.
                self.waiting.admit(request, num_uncached)
                self._admit(plan, request, hits, count)
                budget -= count
                num_rows -= 1
                if count == num_uncached:
                    self.waiting.release_siblings(request)
            else:
                self._head_shortage = BlockShortage.of(self.kv_cache, request, hits)
                return

    @property
    def _may_be_partial(self) -> bool:
        """Whether the partial-prefill limit allows one more prompt in chunks."""
        limit = self.config.max_num_partial_prefills
        return not limit or len(self.running.table.prefilling) < limit

    def is_still_blocked(self, request: Request) -> bool:
        """Whether the head did not fit before and cannot fit now, without looking it up again.

        With nothing running it is always tried: a wrong answer here would be a deadlock.
        """
        return self.num_running > 0 and self._head_shortage.persists(self.kv_cache, request)

    def _find_prefix(self, request: Request) -> list[Block]:
        keys = request.prefix_keys(self.kv_cache.block_size)
        return self.kv_cache.find_prefix(keys, request.num_tokens)

    def _fits(self, request: Request, hits: list[Block]) -> bool:
        """Whether the whole prompt fits now, beside the watermark that others need to grow.

        Only the first chunk's blocks are taken then: two long prompts may fit one by one and not
        together, and one of them is preempted later.
        """
        num_reserved = self._num_reserved_blocks
        return self.kv_cache.can_allocate(request.handle, request.num_tokens, hits, num_reserved)

    @property
    def _num_reserved_blocks(self) -> int:
        return self._watermark_blocks if self.num_running else 0

    def _admit(self, plan: StepPlan, request: Request, hits: list[Block], count: int) -> None:
        """Give a waiting request a row and its first tokens."""
        self.counters.count_dequeued(request, self.clock())
        self.running.admit(plan, request, hits, count)
        request.times.admit(self.clock())
        if self._priority_preemption is not None:
            self._priority_preemption.admitted(request)

    def _end(self, request: Request, keeps_blocks: bool = True) -> None:
        """Forget a request. keeps_blocks: False if their content is damaged."""
        if request.row >= 0:
            self.running.leave(request, keeps_blocks)
            if self._priority_preemption is not None:
                self._priority_preemption.removed(request)
        del self._requests[request.handle]
        if request.waiting_siblings:  # it ended before its prompt was planned
            self.waiting.promote_sibling(request)

    def _log(self, plan: StepPlan, now_s: float) -> None:
        """Log a step, and teach the cost model its duration."""
        # With steps in flight, a step begins to run when the one before it has ended.
        seconds = now_s - max(self._begun_s.popleft(), self._last_update_s)
        self._last_update_s = now_s
        if self.budget.has_target:
            self.budget.observe(plan.num_tokens, plan.context, seconds)
        rows, num_free = len(self.running), self.kv_cache.num_free_blocks
        self.step_log.steps.append(plan.log_entry(now_s, seconds, rows, self.num_waiting, num_free))
