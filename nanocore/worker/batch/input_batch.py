"""The persistent batch: every running row's state, kept between steps and updated incrementally.

A row is fixed for as long as its request runs, and is the same in the engine and on every rank.
Counts and block tables are numpy columns on the host. Token ids live where the model runs: on a CPU
in a table here, else in `DeviceRows`. Sampled tokens are written there, so a step's inputs never
wait for the host to see them. Preparing a step is vectorised and incremental: no Python loop over
tokens or rows, and nothing that grows with contexts. What depends only on the set of decoding rows
is kept until a row comes or goes. Shape suffixes: see `nanocore.kernels.interface`.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from nanocore.kernels.attention import AttentionMetadata
from nanocore.kernels.sampling import TokenPlaces
from nanocore.kernels.step import StepRows
from nanocore.worker.batch.batch_step import BatchStep, StepInputs, StepOrder, ints, running_counts
from nanocore.worker.batch.block_table import AppendedBlocks, BlockTable
from nanocore.worker.plan import NewRow, SchedulerOutput
from nanocore.worker.sampling.columns import RowColumns, SampledRows
from nanocore.worker.sampling.requested_outputs import RequestedOutputRows, RequestedOutputs

_NO_BLOCKS = AppendedBlocks(*(np.zeros(0, np.int32) for _ in range(3)))


class InputBatch:
    """State of all rows.

    Args:
        max_num_seqs: rows. max_model_len: tokens per row at most. block_size: tokens per KV block.
        vocab_size: token ids that there are. num_groups: groups that rows are dealt out
        to, see `nanocore.worker.plan`. has_tokens: False if the rows' tokens are elsewhere.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        num_groups: int = 1,
        has_tokens: bool = True,
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.block_size = block_size
        self.group = np.arange(max_num_seqs) % num_groups
        # One more than is ever computed: the token that is sampled after a prompt of max_model_len.
        num_columns = max_model_len + 1 if has_tokens else 0
        self.token_ids = np.zeros((max_num_seqs, num_columns), np.int32)
        self.blocks = BlockTable(max_num_seqs, -(-max_model_len // block_size))
        self.is_active = np.zeros(max_num_seqs, bool)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.sampling = RowColumns(max_num_seqs, vocab_size)
        self._requested_rows = RequestedOutputRows(max_num_seqs, vocab_size)
        self.token_table = torch.from_numpy(self.token_ids)
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
            self._requested_rows.remove(removed)
        for new in plan.added:
            self._add(new)
        if not plan.block_rows:
            return _NO_BLOCKS
        return self.blocks.append(ints(plan.block_rows), ints(plan.block_ids))

    def advance(self, plan: SchedulerOutput) -> BatchStep:
        """Lay out the plan's step, decodes first, and advance the computed counts."""
        order = self._order(plan)
        rows_B = order.rows_B
        # Counts alone decide what is computed and who samples: tokens may still be unknown here.
        before_B = self.num_computed[rows_B]
        seq_lens_B = before_B + order.counts_B
        self.num_computed[rows_B] = seq_lens_B
        positions_T = before_B[order.source_T] + order.offset_T
        blocks_T = self.blocks.ids[order.rows_T, positions_T // self.block_size]
        # A row samples when its last token is computed, be its id known on the host or not; a chunk
        # that ends before does not.
        samples_B = seq_lens_B == self.num_tokens[rows_B]
        all_sample = bool(samples_B.all())
        return BatchStep(
            group=plan.group,
            order=order,
            all_sample=all_sample,
            seq_lens_B=seq_lens_B,
            positions_T=positions_T,
            slots_T=blocks_T.astype(np.int64) * self.block_size + positions_T % self.block_size,
            sample_index_R=order.last_token_B if all_sample else order.last_token_B[samples_B],
            sample_rows=rows_B if all_sample else rows_B[samples_B],
            sample_positions=seq_lens_B if all_sample else seq_lens_B[samples_B],
        )

    def inputs(self, step: BatchStep) -> StepInputs:
        """The step as kernels on a CPU take it, in the memory of these columns where it can be."""
        order = step.order
        rows_B, positions_T = torch.from_numpy(order.rows_B), torch.from_numpy(step.positions_T)
        seq_lens_B = torch.from_numpy(step.seq_lens_B.astype(np.int32))
        return StepInputs(
            rows=StepRows(
                token_table=self.token_table,
                block_table=self.blocks.table,
                block_size=self.block_size,
                rows_T=torch.from_numpy(order.rows_T),
                positions_T=positions_T,
                rows_B=rows_B,
                seq_lens_B=seq_lens_B,
            ),
            attention=AttentionMetadata(
                num_decodes=order.num_decodes,
                query_start=order.query_start,
                seq_lens=step.seq_lens_B.tolist(),
                num_decodes_1=order.num_decodes_1,
                query_start_A=order.query_start_A,
                seq_lens_B=seq_lens_B,
                block_table=self.blocks.table,
                positions_T=positions_T,
                slot_mapping_T=torch.from_numpy(step.slots_T),
                table_rows_B=rows_B,
            ),
            sample_index_R=torch.from_numpy(step.sample_index_R),
        )

    def sampled_rows(self, step: BatchStep) -> SampledRows:
        """Sampling parameters of the rows that the step samples."""
        if not (step.order.is_decode_only and step.all_sample):
            return self.sampling.of_rows(step.sample_rows)
        samples = self._decode_samples.get(step.group)
        if samples is None:
            samples = self.sampling.of_rows(step.sample_rows)
            self._decode_samples[step.group] = samples
        return samples

    def requested(self, step: BatchStep) -> RequestedOutputs | None:
        """Outputs that the step's rows request beside tokens; call once, in the steps' order."""
        if self._requested_rows.is_empty:
            return None
        order = step.order
        decode_group = step.group if order.is_decode_only and step.all_sample else None
        computed = order.rows_B, order.counts_B, step.seq_lens_B
        return self._requested_rows.requested(step.sample_rows, decode_group, *computed)

    def places(self, step: BatchStep) -> TokenPlaces:
        rows_R, positions_R = map(torch.from_numpy, (step.sample_rows, step.sample_positions))
        return TokenPlaces(self.token_table, rows_R, positions_R)

    def append(self, rows: NDArray[np.integer], token_ids_R: NDArray[np.integer] | None) -> None:
        """Give each of these rows the token it samples; None: it is not known here."""
        if token_ids_R is not None:
            self.token_ids[rows, self.num_tokens[rows]] = token_ids_R
        self.num_tokens[rows] += 1

    def append_sampled(self, rows: NDArray[np.int32], token_ids: NDArray[np.int32]) -> NDArray:
        """Append tokens that another stage sampled; a row stands there once for each of its own.

        Returns their places in the rows, int32.
        """
        places = self.num_tokens[rows] + running_counts(rows)
        if self.token_ids.shape[1]:
            self.token_ids[rows, places] = token_ids
        np.add.at(self.num_tokens, rows, 1)
        return places.astype(np.int32)

    def _order(self, plan: SchedulerOutput) -> StepOrder:
        order = None if plan.chunk_rows else self._decode_orders.get(plan.group)
        if order is None:
            order = StepOrder.of_plan(plan, self.is_active & (self.group == plan.group))
            if order.is_decode_only:
                self._decode_orders[plan.group] = order
        return order

    def _clear_kept(self) -> None:
        # Called before a row comes or goes: what is kept follows from which rows there are.
        self._decode_orders.clear()
        self._decode_samples.clear()

    def _add(self, new: NewRow) -> None:
        row = new.row
        token_ids = ints(new.token_ids)
        assert not self.is_active[row], f"row {row} is taken"
        self.is_active[row] = True
        if self.token_ids.shape[1]:
            self.token_ids[row, : len(token_ids)] = token_ids
        self.num_tokens[row] = len(token_ids)
        self.num_computed[row] = new.num_computed_tokens
        self.blocks.set_row(row, ints(new.block_ids))
        self.sampling.set_row(new)
        self._requested_rows.add(new)
