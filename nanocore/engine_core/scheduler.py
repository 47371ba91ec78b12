"""The unified token-budget scheduler: one kind of step, no prefill or decode phases.

Each request has tokens known and tokens computed; a step lets the second catch up with the first
within a budget (vLLM V1's scheduler; chunked prefill as in Sarathi-Serve, Agrawal et al. 2024).
Running requests come first, in admission order, then waiting ones, first come first served. When
blocks run out the last running request is preempted and recomputed later.

Runs on the step loop's thread. Steady decoding costs a few vector operations on `RowTable` columns;
Python per request runs only for rows that are admitted, chunked, cross a block, end or are
preempted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from nanocore.engine_core.config import SchedulerConfig
from nanocore.engine_core.outputs import ClientOutput, split_by_client
from nanocore.engine_core.request import TOKEN_DTYPE, Request
from nanocore.engine_core.row_table import IntArray, RowTable
from nanocore.kv_cache import KVCacheManager
from nanocore.protocol.messages import Event, FinishReason
from nanocore.protocol.plan import ModelRunnerOutput, NewRow, SchedulerOutput


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_aborts: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


@dataclass(slots=True)
class _Plan:
    """A step being planned; becomes a SchedulerOutput. rows and counts are in scheduling order."""

    rows: IntArray
    counts: IntArray
    added: list[NewRow] = field(default_factory=list)
    block_rows: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)


def _no_rows() -> IntArray:
    return np.zeros(0, np.int64)


@dataclass(slots=True)
class StepRecord:
    """What happened in the last step, for the step trace and for tests."""

    rows: IntArray = field(default_factory=_no_rows)
    counts: IntArray = field(default_factory=_no_rows)
    computed_before: IntArray = field(default_factory=_no_rows)
    new: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    cached: dict[str, int] = field(default_factory=dict)
    finished: list[Request] = field(default_factory=list)


class Scheduler:
    """Decides which tokens of which requests a step computes, and takes its result in.

    `add` and `abort` at any time between steps; then `schedule`, execute, `update`. An abort
    between `schedule` and `update` wins over the step's own result.
    """

    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManager) -> None:
        self.config = config
        self.kv_cache = kv_cache
        self.table = RowTable(config.max_num_seqs, config.max_model_len)
        self.waiting: deque[Request] = deque()
        self.counters = SchedulerCounters()
        self.record = StepRecord()
        self._requests: dict[int, Request] = {}
        self._removed_rows: list[int] = []  # since the last plan; workers learn of them with it
        self._aborted: list[Request] = []  # since the last update

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def num_running(self) -> int:
        """Requests that own a row."""
        return len(self.table)

    def add(self, request: Request) -> None:
        """Queue a request."""
        assert request.handle not in self._requests
        self._requests[request.handle] = request
        self.waiting.append(request)
        self.counters.prompt_tokens += request.num_prompt_tokens

    def abort(self, handle: int) -> Request | None:
        """End a request wherever it is; returns it, or None if it has ended already."""
        request = self._requests.get(handle)
        if request is None:
            return None
        if request.row < 0:
            self.waiting.remove(request)
        self.counters.num_aborts += 1
        self._aborted.append(request)
        self._end(request)
        return request

    def abort_all(self) -> list[Request]:
        """End every request."""
        ended = [self.abort(handle) for handle in list(self._requests)]
        return [request for request in ended if request is not None]

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. Computed counts advance now, not when the result is in."""
        self.record = record = StepRecord()
        plan = self._schedule_running(record)
        if not record.preempted:
            self._schedule_waiting(plan, record)
        table = self.table
        takes_part = plan.counts > 0  # the others wait for budget
        record.rows, record.counts = plan.rows[takes_part], plan.counts[takes_part]
        record.computed_before = table.num_computed[record.rows]
        table.num_computed[record.rows] += record.counts
        self.counters.num_steps += 1
        exceptional = plan.counts != 1
        removed, self._removed_rows = self._removed_rows, []
        return SchedulerOutput(
            step=self.counters.num_steps,
            removed_rows=_column(removed),
            added=plan.added,
            block_rows=_column(plan.block_rows),
            block_ids=_column(plan.block_ids),
            chunk_rows=_column(plan.rows[exceptional]),
            chunk_counts=_column(plan.counts[exceptional]),
            num_tokens=int(plan.counts.sum()),
        )

    def update(self, result: ModelRunnerOutput) -> list[ClientOutput]:
        """Take a step's sampled tokens in: append, check for the end, say what clients get."""
        table = self.table
        rows = np.frombuffer(result.rows, TOKEN_DTYPE)
        token_ids = np.frombuffer(result.token_ids, TOKEN_DTYPE)
        alive = table.is_active[rows]  # not aborted meanwhile; rows are not reused before a plan
        if not alive.all():
            rows, token_ids = rows[alive], token_ids[alive]
        table.append(rows, token_ids)
        self.counters.generation_tokens += len(rows)

        # Everything the output needs is read before rows are freed.
        clients, handles = table.client[rows], table.handle[rows]
        events = []
        for request in map(table.request, rows[table.is_fresh[rows]].tolist()):
            first = Event(handle=request.handle, num_cached_tokens=request.num_cached_tokens)
            events.append((request.client, first))
        table.is_fresh[rows] = False
        ended = (
            (token_ids == table.eos[rows])
            | (table.num_tokens[rows] >= table.max_num_tokens[rows])
            | table.has_stop_ids[rows]
        )
        for i in np.flatnonzero(ended).tolist():
            request = table.request(int(rows[i]))
            finish = self._finish_reason(request, int(token_ids[i]))
            if finish is not None:
                reason, stop_reason = finish
                event = Event(handle=request.handle, finish_reason=reason, stop_reason=stop_reason)
                events.append((request.client, event))
                self.record.finished.append(request)
                self._end(request)
        self.record.finished += self._aborted
        self._aborted = []
        return split_by_client(clients, handles, token_ids, events)

    def _schedule_running(self, record: StepRecord) -> _Plan:
        """Share the budget among running rows, and find blocks for what they get."""
        table = self.table
        rows = table.order
        want = table.num_tokens[rows] - table.num_computed[rows]
        if self.config.long_prefill_token_threshold:
            want = np.minimum(want, self.config.long_prefill_token_threshold)
        budget_before = self.config.max_num_batched_tokens - (np.cumsum(want) - want)
        counts = np.clip(budget_before, 0, want)

        plan = _Plan(rows, counts)
        end = table.num_computed[rows] + counts
        num_kept = len(rows)
        for i in np.flatnonzero(end > table.held_tokens[rows]).tolist():
            while i < num_kept and not self._grow(plan, int(rows[i]), int(end[i])):
                # The last running request gives way; it may be the one that needs the block.
                num_kept -= 1
                record.preempted.append(self._preempt(int(rows[num_kept])))
        plan.rows, plan.counts = rows[:num_kept], counts[:num_kept]
        full_before = table.num_computed[plan.rows] // self.kv_cache.block_size
        full_after = end[:num_kept] // self.kv_cache.block_size
        for i in np.flatnonzero(full_after > full_before).tolist():
            self._register_full_blocks(int(rows[i]), int(full_before[i]), int(full_after[i]))
        return plan

    def _schedule_waiting(self, plan: _Plan, record: StepRecord) -> None:
        """Admit waiting requests while budget, rows and blocks last; none passes the head by."""
        budget = self.config.max_num_batched_tokens - int(plan.counts.sum())
        new_rows, new_counts = [], []
        while self.waiting and budget > 0 and self.table.num_free:
            count = self._admit(self.waiting[0], budget, plan, record)
            if count == 0:
                break
            request = self.waiting.popleft()
            new_rows.append(request.row)
            new_counts.append(count)
            budget -= count
        plan.rows = np.concatenate([plan.rows, np.array(new_rows, np.int64)])
        plan.counts = np.concatenate([plan.counts, np.array(new_counts, np.int64)])

    def _admit(self, request: Request, budget: int, plan: _Plan, record: StepRecord) -> int:
        """Give a waiting request a row and its first tokens; 0 if it does not fit now."""
        num_tokens = request.num_tokens
        hits = self.kv_cache.find_prefix(request.key_chain.keys, num_tokens)
        if not self.kv_cache.can_admit(num_tokens, hits):
            return 0
        num_cached = len(hits) * self.kv_cache.block_size
        count = min(num_tokens - num_cached, budget)
        if self.config.long_prefill_token_threshold:
            count = min(count, self.config.long_prefill_token_threshold)
        block_ids = self.kv_cache.allocate(request.handle, num_cached + count, hits)
        assert block_ids is not None, "the whole request fits, so its first chunk does"
        self.counters.prefix_cache_queries += num_tokens
        self.counters.prefix_cache_hits += num_cached
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached
            record.new.append(request)
        else:
            record.resumed.append(request)
        if num_cached:
            record.cached[request.request_id] = num_cached
        row = self.table.add(request, num_cached, len(block_ids) * self.kv_cache.block_size)
        # At once, so that the next request admitted in this very step can share them.
        num_full = (num_cached + count) // self.kv_cache.block_size
        self._register_full_blocks(row, len(hits), num_full)
        plan.added.append(
            NewRow(
                row=row,
                token_ids=request.token_ids.tobytes(),
                num_computed_tokens=num_cached,
                block_ids=_column(block_ids),
                sampling=request.sampling,
                seed=request.seed,
            )
        )
        return count

    def _grow(self, plan: _Plan, row: int, num_tokens: int) -> bool:
        """Let a running row hold blocks for num_tokens; False if too few are free."""
        block_ids = self.kv_cache.allocate(self.table.request(row).handle, num_tokens)
        if block_ids is None:
            return False
        self.table.held_tokens[row] += len(block_ids) * self.kv_cache.block_size
        plan.block_rows += [row] * len(block_ids)
        plan.block_ids += block_ids
        return True

    def _register_full_blocks(self, row: int, start: int, end: int) -> None:
        """Make a row's blocks number start to end - 1, which this step fills, findable."""
        request = self.table.request(row)
        chain = request.key_chain
        if len(chain.keys) < end:  # output tokens have filled a block
            block_size = self.kv_cache.block_size
            unkeyed = self.table.token_ids[row, chain.num_tokens : end * block_size]
            chain.extend(unkeyed.tobytes())
        self.kv_cache.register(request.handle, chain.keys, start, end)

    def _preempt(self, row: int) -> Request:
        """Take a running request's row and blocks; it waits at the head, to be recomputed."""
        token_ids = self.table.known_tokens(row).copy()
        request = self.table.remove(row)
        request.token_ids = token_ids
        self._removed_rows.append(row)
        self.kv_cache.free(request.handle)
        self.waiting.appendleft(request)
        self.counters.num_preemptions += 1
        return request

    def _end(self, request: Request) -> None:
        """Forget a request; its blocks stay findable by their content."""
        if request.row >= 0:
            self._removed_rows.append(request.row)
            self.table.remove(request.row)
        self.kv_cache.free(request.handle)
        del self._requests[request.handle]

    def _finish_reason(
        self, request: Request, token_id: int
    ) -> tuple[FinishReason, int | None] | None:
        """(finish_reason, stop_reason) if this token ends the request. EOS, stop ids, length."""
        if token_id in request.eos_token_ids:
            return "stop", None
        if token_id in request.sampling.stop_token_ids:
            return "stop", token_id
        if self.table.num_tokens[request.row] >= request.max_num_tokens:
            return "length", None
        return None


def _column(values: list[int] | IntArray) -> bytes:
    return np.asarray(values, TOKEN_DTYPE).tobytes()
