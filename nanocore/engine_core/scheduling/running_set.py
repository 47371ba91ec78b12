"""The running set: rows, their tokens and blocks, and the steps in flight.

The scheduler decides who runs; this class owns the state of those who do. A step goes through

    compute (tokens and blocks of running rows) → admit (new rows) → begin (in flight) → accept

Python per request runs only for rows that are admitted, computed in chunks, cross a block, end or
are preempted; all other rows cost a few vector operations together. A row is *prefilling* while
known tokens of it are left to plan, *decoding* while each step takes one token, and *finishing*
when its last step is planned and the result is not in. Its columns are in `RowTable`:

    num_tokens      tokens whose ids are known
    num_computed    tokens that are computed, counted when they are planned: with steps in flight it
                    may exceed num_tokens
    max_computed    num_computed with which it samples its last token, which is never computed
    held_tokens     tokens that fit its blocks
    quiet_until     num_computed up to which a decode needs no new block and does not end

A step may compute draft tokens beyond a row's known ones; drafts that were not accepted are taken
back (`RowTable.rewind`). `StepPlan` says which rows a step serves, and how.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from nanocore.engine_core.config import SchedulerConfig
from nanocore.engine_core.policy.order import Precedence, PrecedenceKey, next_preempted
from nanocore.engine_core.policy.step_budget import chunk_limit
from nanocore.engine_core.requests.ends import ends_by_length, ends_by_token
from nanocore.engine_core.requests.request import Request
from nanocore.engine_core.requests.step_log import StepLog
from nanocore.engine_core.scheduling.columns import IntArray, TokenColumns, attended_tokens
from nanocore.engine_core.scheduling.row_table import RowTable
from nanocore.engine_core.scheduling.step_plan import Chunk, StepOutcome, StepPlan, new_row
from nanocore.engine_core.scheduling.step_result import ResultReader
from nanocore.kv_cache import Block, KVCacheManager
from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput


class RunningSet:
    """The requests that own rows.

    Args:
        config: the limits.
        kv_cache: the manager of their blocks.
        precedence: sort key of requests; the largest is preempted first.
        step_log: gets the inter-token times.

    table: the rows; only the running set writes it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        precedence: PrecedenceKey,
        step_log: StepLog,
    ) -> None:
        # A row's next step needs its last one's result: with drafts for the number of tokens, with
        # groups because the first pipeline stage learns sampled tokens through the engine.
        self.may_overlap = config.num_groups == 1 and not config.num_speculative_tokens
        self._num_groups = config.num_groups
        self._num_drafts = config.num_speculative_tokens
        self._config = config
        self.table = RowTable(
            config.max_num_seqs,
            config.max_model_len,
            config.num_groups,
            config.num_speculative_tokens,
            step_log,
        )
        self._results = ResultReader(self.table)
        self._in_flight: deque[StepOutcome] = deque()
        # Rows that wait for blocks, over all groups; all are decoding or prefilling. Nobody is
        # admitted while this is not empty, so a stale entry would stop admission for ever.
        self._stalled: set[int] = set()
        # Both since the last plan; workers learn of them with the next one.
        self._removed_rows: list[int] = []
        self._sampled: list[TokenColumns] = []  # for pipeline stages that do not sample
        self._kv_cache = kv_cache
        self.precedence = precedence
        self._by_priority = config.policy == "priority"

    def __len__(self) -> int:
        return len(self.table)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def groups_in_flight(self) -> list[int]:
        return [outcome.plan.group for outcome in self._in_flight]

    @property
    def planned(self) -> StepPlan:
        """The step that began last."""
        return self._in_flight[-1].plan

    @property
    def are_masks_known(self) -> bool:
        """Whether the masks of the planned step can be computed now.

        A mask follows from the request's tokens so far, so no earlier step in flight may still
        sample one of them.
        """
        *before, planned = [outcome.plan for outcome in self._in_flight]
        sampling = {request for earlier in before for _, request in earlier.masked}
        return sampling.isdisjoint(request for _, request in planned.masked)

    @property
    def is_short_of_blocks(self) -> bool:
        """Whether a row waits for blocks. Nobody is admitted then, who would take them from it."""
        return bool(self._stalled)

    @property
    def can_go_on(self) -> bool:
        """Whether a row has tokens to compute, and does not wait for blocks."""
        table = self.table
        return len(table.decoding) + len(table.prefilling) > len(self._stalled)

    def has_work(self, group: int) -> bool:
        """Whether a step of this group, which has none in flight, would compute anything."""
        num_taken, _ = self.table.row_counts(group)
        return num_taken > 0 or any(self.next_chunk(row, group) for row in self.table.prefilling)

    def decode_load(self, group: int) -> tuple[int, int]:
        """Return (tokens, tokens attended to) of the decodes in a step of the group."""
        _, ends, counts = self._decodes(group, set())
        counts = np.ones_like(ends) if counts is None else counts
        return int(counts.sum()), int(attended_tokens(counts, ends).sum())

    def next_chunk(self, row: int, group: int) -> int:
        """Return how many tokens of a prefilling row a step of the group may compute.

        A step of any group may compute a prompt's tokens except the last one. That one samples, and
        a row may sample only in steps of its own group: otherwise its token could still be unknown
        when the next step of its own group, which computes it, is planned.
        """
        table = self.table
        num_left = int(table.num_tokens[row] - table.num_computed[row])
        return min(num_left - (row % self._num_groups != group), self._config.max_chunk)

    def compute(
        self,
        number: int,
        group: int,
        token_budget: int,
        reserved: tuple[Precedence, int] | None = None,
    ) -> tuple[StepPlan, int]:
        """Begin a plan: give every running row of the group its tokens and blocks.

        Args:
            reserved: (precedence, tokens) of a waiting request for which others were preempted: its
                tokens are kept free before prompts of later precedence get theirs.

        Returns the plan and the budget that is left.
        """
        table = self.table
        plan = StepPlan(number, token_budget, group, self._num_groups)
        assert self.may_overlap or group not in self.groups_in_flight, (
            f"step {number} of group {group} needs what its last one, in flight, samples"
        )
        if not (len(table) or self._num_drafts):
            return plan, token_budget
        # One pass may fail for lack of blocks. Then a row was stalled or preempted, its tokens
        # return to the budget, and the next pass shares it out anew. Each failed pass takes one row
        # out, so this ends. Blocks that a pass has allocated stay with their rows: `_provide` finds
        # them next time. Everything else that a pass computes is dropped: computed counts advance
        # only below, after the pass that succeeds.
        while True:
            decoding, ends, counts = self._decodes(group, plan.stalled)
            num_decoded = len(decoding) if counts is None else int(counts.sum())
            # Only these decodes cross a block or reach their length; the others need no Python.
            notable = (ends > table.quiet_until[decoding]).nonzero()[0]
            decodes = list(zip(decoding[notable].tolist(), ends[notable].tolist(), strict=True))
            chunks, budget = self._share_budget(plan, token_budget - num_decoded, reserved)
            if all(self._provide(plan, row, end) for row, end in decodes + chunks):
                break
        # Which rows of this group are stalled is decided anew in each of its plans; rows of other
        # groups stay stalled until their own group plans.
        self._stalled = {r for r in self._stalled if r % self._num_groups != group}
        self._stalled |= plan.stalled
        plan.decoding, plan.decode_ends, plan.decode_counts = decoding, ends, counts
        table.num_computed[decoding] = ends
        for row, end in decodes:
            if end == table.max_computed[row]:
                plan.last.append(row)
        if plan.last and not self._num_drafts:
            table.finish_decoding(plan.last)
        for row, end in chunks:
            self._plan_chunk(plan, row, int(table.num_computed[row]), end)
        return plan, budget

    def admit(self, plan: StepPlan, request: Request, hits: list[Block], count: int) -> None:
        """Give a request a row, its cached blocks `hits`, and `count` tokens to compute after them.

        The caller has checked that the blocks fit.
        """
        block_size = self._kv_cache.block_size
        num_cached = len(hits) * block_size
        end = num_cached + count
        block_ids = self._kv_cache.allocate(request.handle, end, hits)
        assert block_ids is not None, "the whole prompt fits, so its first chunk does"
        resumed = request.was_admitted
        if not resumed:
            self._kv_cache.stats.record(request.num_tokens, num_cached)
        token_ids = request.give_tokens()
        held_tokens = len(block_ids) * block_size
        row = self.table.add(request, token_ids, num_cached, held_tokens, plan.group)
        plan.added.append(new_row(request, token_ids, num_cached, block_ids))
        if resumed:
            plan.resumed.append(request)
        else:
            request.num_cached_tokens = min(num_cached, request.num_prompt_tokens)
            plan.new.append(request)
        if num_cached:
            plan.cached[request.request_id] = num_cached
        self._plan_chunk(plan, row, num_cached, end)

    def begin(self, plan: StepPlan) -> SchedulerOutput:
        """Put the complete plan in flight; returns the message to workers."""
        if plan.started:
            self.table.start_decoding(plan.started)
        plan.masked = self.table.structured(plan.decoding, plan.completed)
        self._in_flight.append(StepOutcome(plan))
        removed_rows, self._removed_rows = self._removed_rows, []
        sampled, self._sampled = self._sampled, []
        return plan.message(self._idle_rows(plan), removed_rows, sampled)

    def accept(self, result: ModelRunnerOutput, now_s: float) -> StepOutcome:
        """Take in the result of the oldest step in flight.

        A row may get no token, or several. Requests that end keep their rows until they `leave`.

        Raises:
            ValueError: the result does not fit the step.
        """
        table = self.table
        outcome = self._in_flight.popleft()
        plan, dead_rows = outcome.plan, outcome.dead_rows
        self._kv_cache.complete(plan.number)  # first: what only this step could write is free now
        sampled = self._results.read(outcome, result)  # without dead rows
        self._results.take_prompt_logprobs(outcome, result)
        pooled = self._results.read_pooled(outcome, result)
        sampled, ends = ends_by_token(table, sampled, pooled)
        table.append(sampled, now_s)
        table.advance_matchers(sampled)
        if plan.decode_counts is not None:
            # Dead rows, too: with drafts a group has one step in flight, so no other request can
            # have got them before this result.
            table.rewind(plan.decoding)
        if self._num_groups > 1:
            self._sampled.append(sampled)
        clients = table.clients
        outcome.clients = next(iter(clients)) if len(clients) == 1 else table.client[sampled.owners]
        outcome.tokens = sampled.renamed(table.handle)
        for row in plan.first:
            if row not in dead_rows and not (row in ends and ends[row][1].message):
                outcome.started.append(table.request(row))
        if plan.last:
            alive = [row for row in plan.last if row not in dead_rows and row not in ends]
            ends |= ends_by_length(table, alive)
        outcome.ends = list(ends.values())
        return outcome

    def preempt(self, request: Request) -> None:
        """Take a request's row and blocks; its tokens go back to it, to be recomputed later.

        Tokens that steps in flight sample for it are lost. They are sampled again, the same ones,
        because noise depends on the request's seed and the position alone.
        """
        token_ids = self.table.known_tokens(request.row).copy()
        self.leave(request)
        request.token_ids = token_ids

    def leave(self, request: Request, keeps_blocks: bool = True) -> None:
        """Take a request's row and blocks.

        Steps in flight may still write the blocks, so they are fenced until the last of these is
        over: nothing relies on workers running steps in order. Results of these steps for the row
        are void, whoever owns it by then.

        keeps_blocks: False if the blocks' content must not be found: it is damaged.
        """
        row = request.row
        if keeps_blocks:
            self._register(request, int(self.table.num_computed[row]))
        else:
            self._kv_cache.forget(request.handle)
        self.table.remove(row)
        self._stalled.discard(row)
        self._removed_rows.append(row)
        for outcome in self._in_flight:
            outcome.dead_rows.add(row)
        last_step = self._in_flight[-1].plan.number if self._in_flight else 0
        self._kv_cache.free(request.handle, after_step=last_step)

    def _decodes(self, group: int, stalled: set[int]) -> tuple[IntArray, IntArray, IntArray | None]:
        """Return (rows, their computed tokens after the step, tokens each computes) of decodes.

        None stands for one token each. Drafts beyond a request's length are not computed.
        """
        table = self.table
        decoding, num_groups = table.decoding, self._num_groups
        if num_groups > 1:
            decoding = decoding[decoding % num_groups == group]
        if stalled:
            decoding = decoding[~np.isin(decoding, list(stalled))]
        num_computed = table.num_computed[decoding]
        if not self._num_drafts:
            return decoding, num_computed + 1, None
        most = num_computed + 1 + table.num_drafts[decoding]
        ends = np.minimum(most, table.max_computed[decoding])
        return decoding, ends, ends - num_computed

    def _idle_rows(self, plan: StepPlan) -> list[int]:
        """Return the group's rows that compute nothing in this step, which workers must be told."""
        table = self.table
        if len(plan.decoding) + len(plan.chunks) == len(table):
            return []
        served = {chunk.row for chunk in plan.chunks}.union(plan.last)
        held = dict.fromkeys((*table.prefilling, *table.finishing, *plan.stalled))
        return [r for r in held if r not in served and r % self._num_groups == plan.group]

    def _share_budget(
        self, plan: StepPlan, budget: int, reserved: tuple[Precedence, int] | None
    ) -> tuple[list[tuple[int, int]], int]:
        """Share the budget among running prompts.

        Returns (row, its computed tokens after the step) of each, and the budget that is left.
        """
        table = self.table
        num_reserved = 0
        chunks: list[tuple[int, int]] = []
        rows: Sequence[int] = table.prefilling
        if self._by_priority:
            rows = sorted(rows, key=lambda row: self.precedence(table.request(row)))
        for row in rows:
            if reserved and not num_reserved and self.precedence(table.request(row)) > reserved[0]:
                num_reserved = min(reserved[1], budget)
                budget -= num_reserved
            limit = chunk_limit(self._config, table, table.request(row), chunks)
            count = min(self.next_chunk(row, plan.group), limit, budget)
            if count and row not in plan.stalled:
                chunks.append((row, count))
                budget -= count
        ends = [(row, int(table.num_computed[row]) + count) for row, count in chunks]
        return ends, budget + num_reserved  # the reserved tokens are for the waiting request

    def _provide(self, plan: StepPlan, row: int, num_tokens: int) -> bool:
        """Let a running row hold blocks for num_tokens; False if another pass is needed."""
        table = self.table
        held_tokens = int(table.held_tokens[row])
        if num_tokens <= held_tokens:
            return True
        request = table.request(row)
        # Decodes register full blocks here and in `leave` only: once a block, not in every step.
        self._register(request, int(table.num_computed[row]))
        block_ids = self._kv_cache.allocate(request.handle, num_tokens)
        if block_ids is None:
            self._make_room(plan, row, num_tokens)
            return False
        table.hold(request, held_tokens + len(block_ids) * self._kv_cache.block_size)
        plan.blocks.setdefault(row, []).extend(block_ids)
        return True

    def _make_room(self, plan: StepPlan, row: int, num_tokens: int) -> None:
        """Stall the row if blocks are about to be released; else preempt somebody for it.

        Blocks come back soon from fences, which end with steps in flight, and from rows that only
        wait for their last token. If these suffice, a step's wait is cheaper than recomputing a
        request. If not, the last running request by precedence is preempted, of any group; that may
        be this row. With steps in flight its blocks are fenced, too: the next pass stalls this row,
        and a later plan gives it the blocks. Both sums are upper bounds, since blocks may be shared
        and others wait for them. A row that stalled in vain is decided on again in its group's next
        plan; with nothing in flight both sums are 0, so somebody is preempted.
        """
        table, kv_cache = self.table, self._kv_cache
        num_needed = kv_cache.num_free_needed(table.request(row).handle, num_tokens)
        finishing = [table.request(other).handle for other in table.finishing]
        num_held = sum(len(kv_cache.block_ids(handle)) for handle in finishing)
        if num_needed <= kv_cache.num_free_blocks + kv_cache.num_fenced_blocks + num_held:
            plan.stalled.add(row)
            return
        last = next_preempted(table, self.precedence)
        # The plan must forget the row: it was given blocks or stalled in an earlier pass. A stalled
        # row that no request owns would never leave `_stalled`, and nobody would be admitted again.
        plan.blocks.pop(last.row, None)
        plan.stalled.discard(last.row)
        plan.preempt(last, table.request(row))
        self.preempt(last)

    def _plan_chunk(self, plan: StepPlan, row: int, computed: int, end: int) -> None:
        """Plan tokens `computed` to `end` - 1 of a prefilling row."""
        table = self.table
        plan.chunks.append(Chunk(row, end - computed, computed))
        table.num_computed[row] = end
        # Now, not when the result is in: a request admitted later in this very step can share the
        # blocks, because all KV writes of a layer precede its reads.
        request = table.request(row)
        plan.num_prompt_tokens += max(min(end, request.num_prompt_tokens) - computed, 0)
        self._register(request, end)
        if end < table.num_tokens[row]:
            return
        table.prefilling.remove(row)
        plan.completed.append(row)
        if end == request.num_submitted_tokens:
            plan.first.append(row)
        if end == request.max_num_tokens - 1:
            plan.last.append(row)
            table.finishing.append(row)
        else:
            plan.started.append(row)

    def _register(self, request: Request, num_computed: int) -> None:
        """Make a running request's full blocks findable, as far as their tokens are known.

        With steps in flight more tokens may be computed than are known; a key needs known ones.
        """
        if not self._kv_cache.enable_prefix_caching:
            return
        block_size = self._kv_cache.block_size
        num_full = num_computed // block_size
        keys = request.key_chain.keys
        if len(keys) < num_full:  # output tokens have filled a block: extend the chain of keys
            table, row = self.table, request.row
            end = min(num_computed, int(table.num_tokens[row]))
            request.key_chain.extend(table.token_ids[row, len(keys) * block_size : end].tobytes())
            num_full = min(num_full, len(keys))
        self._kv_cache.register(request.handle, keys, num_full)
