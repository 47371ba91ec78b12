"""The persistent batch: every running row's state, kept between steps and updated incrementally.

A row is fixed for as long as its request runs, and is the same in the engine and on every rank.
Counts and block ids are numpy columns here; token ids are in `RowTables`, where the model runs.
Sampled tokens are written there, so a step's inputs never wait for the host to see them. Preparing
a step is vectorised and incremental: no Python loop over tokens or rows, and nothing that grows
with contexts. What depends only on the set of decoding rows is kept until a row comes or goes.
Shape suffixes: see `nanocore.kernels.interface`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nanocore.worker.plan import NewRow, SchedulerOutput
from nanocore.worker.sampling.columns import RowColumns, SampledRows
from nanocore.worker.sampling.slot_outputs import OutputRows, SlotOutputs
from nanocore.worker.step.batch_step import BatchStep, StepOrder, ints, running_counts, zeros
from nanocore.worker.step.lanes import RowLanes
from nanocore.worker.step.step_memory import NO_BLOCKS, AppendedBlocks, BlockTable


class InputBatch:
    """State of all rows.

    Args:
        max_num_seqs: rows. max_model_len: tokens per row at most. block_size: tokens per KV block.
        vocab_size: token ids that there are. num_groups: groups that rows are dealt out
        to, see `nanocore.worker.plan`. max_drafts: that a row may compute in a step.
        num_cache_groups: groups of layers, with blocks of their own.

    num_tokens, num_computed: of rows whose drafts are being verified, as many as it may be. owner:
    counts the requests that had a row.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        num_groups: int = 1,
        max_drafts: int = 0,
        num_cache_groups: int = 1,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.block_size = block_size
        self.max_drafts = max_drafts
        self.group = np.arange(max_num_seqs) % num_groups
        # A spare row for padding.
        size = max_num_seqs + 1, -(-max_model_len // block_size)
        self.blocks = BlockTable(*size, num_cache_groups)
        self.is_active = np.zeros(max_num_seqs, bool)
        self.owner = np.zeros(max_num_seqs, np.int64)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.sampling = RowColumns(max_num_seqs, vocab_size)
        self._lanes = RowLanes(max_num_seqs)
        self._output_rows = OutputRows(max_num_seqs, vocab_size)
        self._decode_orders: dict[int, StepOrder] = {}
        self._decode_samples: dict[int, SampledRows] = {}
        """Both by group, and made when they are first needed; see `_clear_kept`."""

    def apply(self, plan: SchedulerOutput) -> AppendedBlocks:
        """Take in a plan's differences: rows removed, rows added, blocks appended.

        Returns the blocks that were appended to rows, but for those that came with new rows.
        """
        # Removed rows go before added ones: a plan may give a freed row to another request.
        if plan.removed_rows or plan.added:
            self._clear_kept()
        if plan.removed_rows:
            removed = ints(plan.removed_rows)
            self.is_active[removed] = False
            self._output_rows.remove(removed)
        for new in plan.added:
            self._add(new)
        if not plan.block_rows:
            return NO_BLOCKS
        return self.blocks.append(ints(plan.block_rows), ints(plan.block_ids))

    def advance(self, plan: SchedulerOutput) -> BatchStep:
        """Lay out the plan's step, decodes first, and advance the computed counts."""
        order = self._order(plan)
        rows_B = order.rows_B
        # Counts alone decide what is computed and who samples: tokens may still be unknown here.
        before_B = self.num_computed[rows_B]
        seq_lens_B = before_B + order.counts_B
        self.num_computed[rows_B] = seq_lens_B
        is_steady = order.is_decode_only
        positions_T = before_B if is_steady else before_B[order.source_T] + order.offset_T
        # A row samples behind its last token, be its id known on the host or not, and behind each
        # of its drafts; a chunk that ends before does not.
        slots_B = seq_lens_B - self.num_tokens[rows_B] + 1
        all_sample = not np.count_nonzero(slots_B != 1)  # faster than `all` for few rows
        sampling_rows, slot_counts = rows_B, slots_B
        index_S, rows_S, positions_S = order.last_token_B, rows_B, seq_lens_B
        num_drafts_B = zeros(len(rows_B))
        if not all_sample:
            most = int(slots_B.max())
            assert most <= 1 + self.max_drafts, f"step {plan.step}: {most - 1} drafts in a row"
            slots_B = slots_B.clip(min=0)
            num_drafts_B = (slots_B - 1).clip(min=0)
            sampling = slots_B.nonzero()[0]
            sampling_rows, slot_counts = rows_B[sampling], slots_B[sampling]
            source_S = sampling.repeat(slot_counts)
            # How far each slot is before its row's last one.
            behind_S = slot_counts.cumsum().repeat(slot_counts) - 1 - np.arange(len(source_S))
            index_S, rows_S = order.last_token_B[source_S] - behind_S, rows_B[source_S]
            positions_S = seq_lens_B[source_S] - behind_S
        return BatchStep(
            group=plan.group,
            order=order,
            all_sample=all_sample,
            seq_lens_B=seq_lens_B,
            positions_T=positions_T,
            slots_GT=self.blocks.slots(order.rows_T, positions_T, self.block_size),
            sampling_rows=sampling_rows,
            slot_counts=slot_counts,
            sample_index=index_S,
            sample_rows=rows_S,
            sample_positions=positions_S,
            num_drafts_B=num_drafts_B,
            lanes=self._lanes.of_tokens(order.rows_T),
        )

    def append(self, step: BatchStep) -> None:
        """Give rows the tokens that they sample, as many as it may be."""
        self.num_tokens[step.sampling_rows] += step.slot_counts

    def sampled_rows(self, step: BatchStep) -> SampledRows:
        """Sampling parameters of the step's sample slots."""
        if not (step.order.is_decode_only and step.all_sample):
            return self.sampling.of_rows(step.sample_rows)
        samples = self._decode_samples.get(step.group)
        if samples is None:
            samples = self.sampling.of_rows(step.sample_rows)
            self._decode_samples[step.group] = samples
        return samples

    def outputs(self, step: BatchStep) -> SlotOutputs | None:
        """What the step is to report beside tokens; call once, in the steps' order."""
        order = step.order
        decode_group = step.group if order.is_decode_only and step.all_sample else None
        computed = order.rows_B, order.counts_B, step.seq_lens_B
        return self._output_rows.of_step(step.sample_rows, decode_group, *computed)

    def append_sampled(self, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        """Give rows tokens that another stage sampled; a row stands there once for each of its own.

        Returns their places in the rows.
        """
        places = self.num_tokens[rows] + running_counts(rows)
        np.add.at(self.num_tokens, rows, 1)
        return places.astype(np.int32)

    def correct(self, rows: NDArray[np.int64], excess: NDArray[np.int64]) -> None:
        """Take back tokens of distinct rows, which were drafts and are wrong."""
        self.num_tokens[rows] -= excess
        self.num_computed[rows] -= excess

    def _order(self, plan: SchedulerOutput) -> StepOrder:
        order = None if plan.chunk_rows else self._decode_orders.get(plan.group)
        if order is None:
            decodes = self.is_active & (self.group == plan.group)
            order = StepOrder.of_plan(plan, decodes, 1 + self.max_drafts)
            if order.is_decode_only:
                self._decode_orders[plan.group] = order
        return order

    def _clear_kept(self) -> None:
        # Called before a row comes or goes: what is kept follows from which rows there are.
        self._decode_orders.clear()
        self._decode_samples.clear()

    def _add(self, new: NewRow) -> None:
        row = new.row
        assert not self.is_active[row], f"row {row} is taken"
        self.is_active[row] = True
        self.owner[row] += 1
        self.num_tokens[row] = len(new.token_ids) // 4
        self.num_computed[row] = new.num_computed_tokens
        self.blocks.set_row(row, ints(new.block_ids))
        self.sampling.set_row(new)
        self._lanes.set_row(new)
        self._output_rows.add(new)
