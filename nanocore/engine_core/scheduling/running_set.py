"""The running set: rows, their blocks, and what a step computes of them.

Gives rows their tokens within the budget and their blocks, and preempts when blocks run out. Python
per request runs only for rows that are admitted, chunked, cross a block, end or are preempted; the
others cost a few vector operations together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from nanocore.engine_core.config import SchedulerConfig
from nanocore.engine_core.scheduling.request import Request
from nanocore.engine_core.scheduling.row_table import IntArray, RowTable
from nanocore.engine_core.scheduling.step import Chunk, Step
from nanocore.engine_core.scheduling.waiting_queue import Precedence
from nanocore.kv_cache import Block, KVCacheManager


class RunningSet:
    """The requests that own rows.

    Args:
        config: the limits. kv_cache: where their blocks are.
        precedence: sort key of requests; the largest is preempted first.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        precedence: Callable[[Request], Precedence],
    ) -> None:
        self.table = RowTable(config.max_num_seqs, config.max_model_len, config.num_groups)
        self.in_flight: deque[Step] = deque()
        self.removed_rows: list[int] = []
        """Since the last plan; workers learn of them with it."""
        self.stalled: set[int] = set()
        """Rows that wait for blocks; nobody is admitted meanwhile, who could take them."""
        self.max_chunk = config.long_prefill_token_threshold or config.max_num_batched_tokens
        """Tokens that a prompt may compute in one step."""
        self._kv_cache = kv_cache
        self._precedence = precedence

    def schedule(self, step: Step) -> int:
        """Give every running row its tokens and blocks; returns what is left of the budget.

        Each round either provides for all rows or lets one of them go, whose tokens return to the
        budget; nothing is settled before the last round.
        """
        table = self.table
        if not len(table):
            return step.token_budget
        while True:
            decoding = self.decoding_rows(step.group)
            if step.stalled:
                decoding = decoding[~np.isin(decoding, list(step.stalled))]
            ends = table.num_computed[decoding] + 1
            notable = (ends > table.quiet_until[decoding]).nonzero()[0]
            decodes = list(zip(decoding[notable].tolist(), ends[notable].tolist(), strict=True))
            chunks, budget = self._share_budget(step, step.token_budget - len(decoding))
            if all(self._provide(step, row, end) for row, end in decodes + chunks):
                break
        self.stalled = {r for r in self.stalled if r % table.num_groups != step.group}
        self.stalled |= step.stalled
        step.decoding, step.decode_ends = decoding, ends
        table.num_computed[decoding] = ends
        for row, end in decodes:
            if end + 1 == table.request(row).max_num_tokens:
                step.last.append(row)
        if step.last:
            table.finish_decoding(step.last)
        for row, end in chunks:
            self._compute_chunk(step, row, int(table.num_computed[row]), end)
        return budget

    def admit(self, step: Step, request: Request, hits: list[Block], num_tokens: int) -> list[int]:
        """Give a request a row and blocks for its first num_tokens, of which `hits` are cached.

        Returns the ids of the blocks; too few being free is the caller's error.
        """
        block_size = self._kv_cache.block_size
        block_ids = self._kv_cache.allocate(request.handle, num_tokens, hits)
        assert block_ids is not None, "the whole prompt fits, so its first chunk does"
        num_cached = len(hits) * block_size
        row = self.table.add(request, num_cached, len(block_ids) * block_size, step.group)
        self._compute_chunk(step, row, num_cached, num_tokens)
        return block_ids

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
        self.stalled.discard(row)
        self.removed_rows.append(row)
        for step in self.in_flight:
            step.dead_rows.add(row)
        last_step = self.in_flight[-1].number if self.in_flight else 0
        self._kv_cache.free(request.handle, after_step=last_step)

    @property
    def can_go_on(self) -> bool:
        """Whether a row has tokens to compute, and does not wait for blocks."""
        table = self.table
        num_ready = len(table.decoding) + len(table.prefilling) - len(self.stalled)
        return num_ready > 0

    def decoding_rows(self, group: int) -> IntArray:
        """The group's rows that take one token in every step of the group."""
        decoding, num_groups = self.table.decoding, self.table.num_groups
        return decoding if num_groups == 1 else decoding[decoding % num_groups == group]

    def next_chunk(self, row: int, group: int) -> int:
        """Tokens of a prefilling row that a step of the group may compute, if it has the budget.

        The last token, which samples, is for the row's own group: other steps may be in flight
        beside this one, and the next one of the group is planned when this one's tokens are known.
        """
        table = self.table
        num_left = int(table.num_tokens[row] - table.num_computed[row])
        return min(num_left - (row % table.num_groups != group), self.max_chunk)

    def exceptions(self, step: Step) -> tuple[list[int], list[int]]:
        """Rows whose token count is not what the plan's group says, and that count."""
        table = self.table
        num_groups, group = table.num_groups, step.group
        rows, counts = [], []
        for row, num_tokens, _ in step.chunks:
            if num_tokens != 1 or row % num_groups != group:
                rows.append(row)
                counts.append(num_tokens)
        if len(step.decoding) + len(step.chunks) < len(table):
            served = {chunk.row for chunk in step.chunks}.union(step.last)
            idle = dict.fromkeys((*table.prefilling, *table.finishing, *step.stalled))
            idle_rows = [r for r in idle if r not in served and r % num_groups == group]
            rows += idle_rows
            counts += [0] * len(idle_rows)
        return rows, counts

    def _share_budget(self, step: Step, budget: int) -> tuple[list[tuple[int, int]], int]:
        """(row, its computed tokens after the step) of running prompts, and the rest of budget."""
        table = self.table
        chunks = []
        for row in table.prefilling:
            count = min(self.next_chunk(row, step.group), budget)
            if count and row not in step.stalled:
                chunks.append((row, int(table.num_computed[row]) + count))
                budget -= count
        return chunks, budget

    def _provide(self, step: Step, row: int, num_tokens: int) -> bool:
        """Let a running row hold blocks for num_tokens; False if another round must be tried."""
        table = self.table
        held_tokens = int(table.held_tokens[row])
        if num_tokens <= held_tokens:
            return True
        request = table.request(row)
        self._register(request, int(table.num_computed[row]))
        block_ids = self._kv_cache.allocate(request.handle, num_tokens)
        if block_ids is None:
            self._make_room(step, row, num_tokens)
            return False
        table.hold(request, held_tokens + len(block_ids) * self._kv_cache.block_size)
        step.blocks.setdefault(row, []).extend(block_ids)
        return True

    def _make_room(self, step: Step, row: int, num_tokens: int) -> None:
        """Let the row wait, if steps in flight are about to release blocks; else preempt."""
        table, kv_cache = self.table, self._kv_cache
        num_needed = kv_cache.num_free_needed(table.request(row).handle, num_tokens)
        ending = [table.request(finishing).handle for finishing in table.finishing]
        num_held = sum(len(kv_cache.block_ids(handle)) for handle in ending)
        if num_needed <= kv_cache.num_free_blocks + kv_cache.num_fenced_blocks + num_held:
            step.stalled.add(row)
            return
        candidates = [request for request in table.running() if request.row not in table.finishing]
        self._preempt(step, max(candidates, key=self._preemption_order))

    def _preemption_order(self, request: Request) -> tuple[int, int, int, int]:
        """The largest is preempted: last by (priority, arrival); of equals the cheapest one.

        It costs the tokens it computed itself: what it found in the prefix cache it is likely to
        find again. The one that would cost most stays, so there is always progress.
        """
        priority, arrival, handle = self._precedence(request)
        num_computed, num_cached = self.table.num_computed, self.table.num_cached
        return priority, arrival, int(num_cached[request.row] - num_computed[request.row]), handle

    def _preempt(self, step: Step, request: Request) -> None:
        """Take a running request's row and blocks; it is to be recomputed later."""
        row = request.row
        request.token_ids = self.table.known_tokens(row).copy()
        self.leave(request)
        step.blocks.pop(row, None)
        step.preempted.append(request)

    def _compute_chunk(self, step: Step, row: int, computed: int, end: int) -> None:
        """Plan a prefilling row's tokens from number `computed` up to `end`."""
        table = self.table
        step.chunks.append(Chunk(row, end - computed, computed))
        table.num_computed[row] = end
        # At once, so that the next request admitted in this very step can share the blocks.
        request = table.request(row)
        self._register(request, end)
        if end < table.num_tokens[row]:
            return
        table.prefilling.remove(row)
        if end == request.num_prompt_tokens:
            step.first.append(row)
        if end + 1 == request.max_num_tokens:
            step.last.append(row)
            table.finishing.append(row)
        else:
            step.started.append(row)

    def _register(self, request: Request, num_computed: int) -> None:
        """Make a running request's full blocks findable."""
        if not self._kv_cache.enable_prefix_caching:
            return
        block_size = self._kv_cache.block_size
        num_full = num_computed // block_size
        keys = request.key_chain.keys
        if len(keys) < num_full:  # output tokens have filled a block
            table, row = self.table, request.row
            num_full = min(num_computed, int(table.num_tokens[row])) // block_size  # the known ones
            unkeyed = table.token_ids[row, len(keys) * block_size : num_full * block_size]
            request.key_chain.extend(unkeyed.tobytes())
        self._kv_cache.register(request.handle, keys, num_full)
