"""The running set: rows, their tokens, states and blocks, and the steps in flight.

Their one owner: the scheduler decides who runs and reads what it needs here. A step's life is
`compute` (what running rows compute of it), `admit` (new rows), `begin` (it is in flight) and
`accept` (its tokens are in). A step may compute drafts beyond a row's known tokens; those that were
not accepted are taken back. Python per request runs only for rows that are admitted,
chunked, cross a block, end or are preempted; the others cost a few vector operations together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nanocore.engine_core.config import SchedulerConfig
from nanocore.engine_core.scheduling import structured_rows
from nanocore.engine_core.scheduling.ends import ends_by_length, ends_by_token
from nanocore.engine_core.scheduling.journal import Journal
from nanocore.engine_core.scheduling.precedence import Precedence, PrecedenceKey
from nanocore.engine_core.scheduling.preemption import next_preempted
from nanocore.engine_core.scheduling.request import Request
from nanocore.engine_core.scheduling.row_table import RowTable
from nanocore.engine_core.scheduling.spans import IntArray, attended_tokens
from nanocore.engine_core.scheduling.step import Chunk, StepOutcome, StepPlan, new_row
from nanocore.engine_core.scheduling.step_budget import chunk_limit
from nanocore.engine_core.scheduling.step_result import ResultReader
from nanocore.engine_core.scheduling.token_columns import TokenColumns
from nanocore.kv_cache import Block, KVCacheManager
from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput


class RunningSet:
    """The requests that own rows.

    Args:
        config: the limits. kv_cache: where their blocks are.
        precedence: sort key of requests; the largest is preempted first. journal: of tokens' times.

    table: the rows, which the running set alone writes.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        precedence: PrecedenceKey,
        journal: Journal,
    ) -> None:
        self.max_chunk = config.max_chunk
        """Tokens that a prompt may compute in one step."""
        self.may_overlap = config.num_groups == 1 and not config.num_speculative_tokens
        """Whether a step may be planned while others are in flight that its rows are in."""
        self._num_groups = config.num_groups
        self._num_drafts = config.num_speculative_tokens
        self._config = config
        sizes = config.max_num_seqs, config.max_model_len, config.num_groups, self._num_drafts
        self.table = RowTable(*sizes, journal)
        self._results = ResultReader(self.table)
        self._in_flight: deque[StepOutcome] = deque()
        self._stalled: set[int] = set()  # rows that wait for blocks
        self._removed_rows: list[int] = []  # since the last plan; workers learn of them with it
        self._sampled: list[TokenColumns] = []  # since then, too, if earlier stages are to learn it
        self._kv_cache = kv_cache
        self._precedence = precedence
        self._by_priority = config.policy == "priority"

    def __len__(self) -> int:
        return len(self.table)

    @property
    def num_in_flight(self) -> int:
        """Steps whose results are not in."""
        return len(self._in_flight)

    @property
    def groups_in_flight(self) -> list[int]:
        """The group of each step in flight, the oldest first."""
        return [outcome.plan.group for outcome in self._in_flight]

    @property
    def planned(self) -> StepPlan:
        """The step that began last, and is in flight."""
        return self._in_flight[-1].plan

    @property
    def are_masks_known(self) -> bool:
        """Whether the tokens are known that the planned step's masks follow from."""
        *before, planned = [outcome.plan for outcome in self._in_flight]
        return structured_rows.are_masks_known(planned, before)

    @property
    def prefilling(self) -> Sequence[int]:
        """Rows with tokens to compute before they can, in admission order."""
        return self.table.prefilling

    @property
    def is_short_of_blocks(self) -> bool:
        """Whether a row waits for blocks: nobody is admitted meanwhile, who could take them."""
        return bool(self._stalled)

    @property
    def can_go_on(self) -> bool:
        """Whether a row has tokens to compute, and does not wait for blocks."""
        return len(self.table.decoding) + len(self.prefilling) > len(self._stalled)

    def has_work(self, group: int) -> bool:
        """Whether a step of this group, of which none is in flight, has anything to compute."""
        num_taken, _ = self.table.row_counts(group)
        return num_taken > 0 or any(self.next_chunk(row, group) for row in self.table.prefilling)

    def row_counts(self, group: int) -> tuple[int, int]:
        """(rows of the group that requests own, rows that none does)."""
        return self.table.row_counts(group)

    def requests(self) -> list[Request]:
        """The requests that own rows, by row."""
        return self.table.running()

    def request(self, row: int) -> Request:
        """The request that owns this row."""
        return self.table.request(row)

    def known_tokens(self, row: int) -> NDArray[np.int32]:
        """A view of the row's prompt and output tokens so far."""
        return self.table.known_tokens(row)

    def num_computed_tokens(self, row: int) -> int:
        """Tokens whose KV is computed or planned to be; may have passed those known."""
        return int(self.table.num_computed[row])

    def decode_load(self, group: int) -> tuple[int, int]:
        """(tokens, context) of what decoding rows would compute in a step of the group."""
        _, ends, counts = self._decodes(group, set())
        counts = np.ones_like(ends) if counts is None else counts
        return int(counts.sum()), int(attended_tokens(counts, ends).sum())

    def next_chunk(self, row: int, group: int) -> int:
        """Tokens of a prefilling row that a step of the group may compute, if it has the budget.

        The last token, which samples, is for the row's own group: other steps may be in flight
        beside this one, and the next one of the group is planned when this one's tokens are known.
        """
        table = self.table
        num_left = int(table.num_tokens[row] - table.num_computed[row])
        return min(num_left - (row % self._num_groups != group), self.max_chunk)

    def compute(
        self, number: int, group: int, token_budget: int, kept: tuple[Precedence, int] | None = None
    ) -> tuple[StepPlan, int]:
        """Begin a plan: give every running row its tokens and blocks. Also returns the budget left.

        kept: so many tokens are for one that waits, and goes before prompts of later precedence.
        Each round either provides for all rows or lets one of them go, whose tokens return to the
        budget; nothing is settled before the last round.
        """
        table = self.table
        plan = StepPlan(number, token_budget, group, self._num_groups)
        assert self.may_overlap or group not in self.groups_in_flight, (
            f"step {number} of group {group} needs what its last one, in flight, samples"
        )
        if not (len(table) or self._num_drafts):
            return plan, token_budget
        while True:
            decoding, ends, counts = self._decodes(group, plan.stalled)
            num_decoded = len(decoding) if counts is None else int(counts.sum())
            notable = (ends > table.quiet_until[decoding]).nonzero()[0]
            decodes = list(zip(decoding[notable].tolist(), ends[notable].tolist(), strict=True))
            chunks, budget = self._share_budget(plan, token_budget - num_decoded, kept)
            if all(self._provide(plan, row, end) for row, end in decodes + chunks):
                break
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
            self._compute_chunk(plan, row, int(table.num_computed[row]), end)
        return plan, budget

    def admit(self, plan: StepPlan, request: Request, hits: list[Block], count: int) -> None:
        """Give a request a row, and `count` tokens after those whose blocks were found cached.

        Too few blocks being free is the caller's error.
        """
        block_size = self._kv_cache.block_size
        num_cached = len(hits) * block_size
        end = num_cached + count
        block_ids = self._kv_cache.allocate(request.handle, end, hits)
        assert block_ids is not None, "the whole prompt fits, so its first chunk does"
        resumed = request.num_cached_tokens is not None
        self._kv_cache.stats.record(request.num_tokens, num_cached, resumed)
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
        self._compute_chunk(plan, row, num_cached, end)

    def begin(self, plan: StepPlan) -> SchedulerOutput:
        """The plan is complete and in flight from here on; returns it as workers are told it."""
        if plan.started:
            self.table.start_decoding(plan.started)
        plan.masked = structured_rows.masked_rows(self.table, plan)
        self._in_flight.append(StepOutcome(plan))
        removed_rows, self._removed_rows = self._removed_rows, []
        sampled, self._sampled = self._sampled, []
        return plan.message(self._idle_rows(plan), removed_rows, sampled)

    def accept(self, result: ModelRunnerOutput, now_s: float) -> StepOutcome:
        """Take the result of the oldest step in flight: 0 to as many tokens per row as it computed.

        Requests that end with it keep their rows until they `leave`.

        Raises:
            ValueError: the result does not fit the step.
        """
        table = self.table
        outcome = self._in_flight.popleft()
        plan, dead_rows = outcome.plan, outcome.dead_rows
        self._kv_cache.complete(plan.number)
        sampled = self._results.read(outcome, result)
        self._results.take_prompt_logprobs(outcome, result)
        pooled = self._results.read_pooled(outcome, result)
        sampled, ends = ends_by_token(table, sampled, pooled)
        table.append(sampled, now_s)
        structured_rows.tell_matchers(table, sampled)
        if plan.decode_counts is not None:
            table.rewind(plan.decoding)  # dead ones, too: nobody has them yet
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
        """Take a request's row and blocks, between steps; it is to be recomputed later."""
        token_ids = self.known_tokens(request.row).copy()
        self.leave(request)
        request.token_ids = token_ids

    def leave(self, request: Request, keeps_blocks: bool = True) -> None:
        """Take a request's row and blocks; steps in flight may write those until they are over.

        keeps_blocks: False if nobody shall find what they hold.
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
        """(rows, their computed tokens after the step, how many it computes) of a group's decodes.

        None stands for one each. Drafts are computed only as far as all would be wanted.
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
        """The group's rows of which the plan computes nothing."""
        table = self.table
        if len(plan.decoding) + len(plan.chunks) == len(table):
            return []
        served = {chunk.row for chunk in plan.chunks}.union(plan.last)
        held = dict.fromkeys((*table.prefilling, *table.finishing, *plan.stalled))
        return [r for r in held if r not in served and r % self._num_groups == plan.group]

    def _share_budget(
        self, plan: StepPlan, budget: int, kept: tuple[Precedence, int] | None
    ) -> tuple[list[tuple[int, int]], int]:
        """(row, its computed tokens after the step) of running prompts, and the rest of budget."""
        table, num_kept = self.table, 0
        chunks: list[tuple[int, int]] = []
        rows = table.prefilling
        if self._by_priority:
            rows = sorted(rows, key=lambda row: self._precedence(table.request(row)))
        for row in rows:
            if kept and not num_kept and self._precedence(table.request(row)) > kept[0]:
                budget -= (num_kept := min(kept[1], budget))
            limit = chunk_limit(self._config, table, table.request(row), chunks)
            count = min(self.next_chunk(row, plan.group), limit, budget)
            if count and row not in plan.stalled:
                chunks.append((row, count))
                budget -= count
        ends = [(row, int(table.num_computed[row]) + count) for row, count in chunks]
        return ends, budget + num_kept

    def _provide(self, plan: StepPlan, row: int, num_tokens: int) -> bool:
        """Let a running row hold blocks for num_tokens; False if another round must be tried."""
        table = self.table
        held_tokens = int(table.held_tokens[row])
        if num_tokens <= held_tokens:
            return True
        request = table.request(row)
        self._register(request, int(table.num_computed[row]))
        block_ids = self._kv_cache.allocate(request.handle, num_tokens)
        if block_ids is None:
            self._make_room(plan, row, num_tokens)
            return False
        table.hold(request, held_tokens + len(block_ids) * self._kv_cache.block_size)
        plan.blocks.setdefault(row, []).extend(block_ids)
        return True

    def _make_room(self, plan: StepPlan, row: int, num_tokens: int) -> None:
        """Let the row wait, if steps in flight are about to release blocks; else preempt."""
        table, kv_cache = self.table, self._kv_cache
        num_needed = kv_cache.num_free_needed(table.request(row).handle, num_tokens)
        ending = [table.request(finishing).handle for finishing in table.finishing]
        num_held = sum(len(kv_cache.block_ids(handle)) for handle in ending)
        if num_needed <= kv_cache.num_free_blocks + kv_cache.num_fenced_blocks + num_held:
            plan.stalled.add(row)
            return
        last = next_preempted(table, self._precedence)
        plan.blocks.pop(last.row, None)
        plan.stalled.discard(last.row)  # it waits for a row now, too: nobody else may wait for it
        plan.preempt(last, table.request(row))
        self.preempt(last)

    def _compute_chunk(self, plan: StepPlan, row: int, computed: int, end: int) -> None:
        """Plan a prefilling row's tokens from number `computed` up to `end`."""
        table = self.table
        plan.chunks.append(Chunk(row, end - computed, computed))
        table.num_computed[row] = end
        # At once, so that the next request admitted in this very step can share the blocks.
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
        """Make a running request's full blocks findable, as far as their tokens are known."""
        if not self._kv_cache.enable_prefix_caching:
            return
        block_size = self._kv_cache.block_size
        num_full = num_computed // block_size
        keys = request.key_chain.keys
        if len(keys) < num_full:  # output tokens have filled a block
            table, row = self.table, request.row
            end = min(num_computed, int(table.num_tokens[row]))
            request.key_chain.extend(table.token_ids[row, len(keys) * block_size : end].tobytes())
            num_full = min(num_full, len(keys))
        self._kv_cache.register(request.handle, keys, num_full)
