"""The persistent batch: every running row's state, kept between steps and changed by differences.

A row is fixed for as long as its request runs, and is the same in the engine and on every rank.
Counts and block tables are numpy columns on the host; the token table lives on the device, where
sampled tokens are written, so a step's inputs never wait for the host to see them. Preparing a step
is vectorised and incremental: no Python loop over tokens or rows, nothing that grows with contexts,
and what follows from which rows decode is made once for as long as they do. Shape suffixes: see
`nanocore.kernels.backend`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.kernels.backend import AttentionMetadata
from nanocore.protocol.plan import NewRow, SchedulerOutput
from nanocore.worker.block_table import BlockTable
from nanocore.worker.sampling.sampling_metadata import SamplingMetadata

_MAX_FLOAT32 = float(np.finfo(np.float32).max)  # as good as any temperature above it
_TOKEN_DTYPE = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a step computes. token_ids_T: int64 on the device.

    sample_index_R: which of the T tokens' hidden states sample. sample_rows: their rows, on the
    host; sample_positions: the positions the sampled tokens will take.
    """

    token_ids_T: Tensor
    attention: AttentionMetadata
    sample_index_R: Tensor
    sample_rows: NDArray[np.int64]
    sample_positions: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Order:
    """A step's rows in the order of its tokens, and what follows from their counts alone.

    source_T: which of the B each token belongs to; offset_T: the how many-th of its row it is.
    table_rows_T, last_token_B: on the device; the tokens' rows, and the last token of each row.
    """

    num_decodes: int
    rows_B: NDArray[np.int64]
    counts_B: NDArray[np.int64]
    rows_T: NDArray[np.int64]
    source_T: NDArray[np.int64]
    offset_T: NDArray[np.int64]
    query_start: list[int]
    table_rows_T: Tensor
    last_token_B: Tensor


class InputBatch:
    """State of all rows.

    Args:
        max_num_seqs: rows. max_model_len: tokens per row at most. block_size: tokens per KV block.
        vocab_size: the value of top_k where it is off. device: where the model runs.
        num_groups: groups that rows are dealt out to, see `nanocore.protocol.plan`.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        num_groups: int = 1,
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.device = device
        self.group = np.arange(max_num_seqs) % num_groups
        self.token_table = torch.zeros(
            max_num_seqs, max_model_len, dtype=torch.int32, device=device
        )
        # On a CPU the same memory: numpy's indexing takes a tenth of torch's time for few rows.
        self._host_tokens = self.token_table.numpy() if device.type == "cpu" else None
        self.blocks = BlockTable(max_num_seqs, -(-max_model_len // block_size), device)
        self.is_active = np.zeros(max_num_seqs, bool)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.greedy = np.zeros(max_num_seqs, bool)
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int32)
        self.top_p = np.zeros(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.seed = np.zeros(max_num_seqs, np.int64)
        # Valid until a row is added or removed:
        self._decode_orders: dict[int, _Order] = {}
        """By group, of steps in which all of the group's rows decode."""
        self._sampling: tuple[NDArray[np.int64], SamplingMetadata] | None = None

    def apply(self, plan: SchedulerOutput) -> None:
        """Take in a plan's differences: rows removed, rows added, blocks appended."""
        if plan.removed_rows or plan.added:
            self._decode_orders.clear()
            self._sampling = None
        self.is_active[_ints(plan.removed_rows)] = False
        for new in plan.added:
            self._add(new)
        if plan.block_rows:
            self.blocks.append(_ints(plan.block_rows), _ints(plan.block_ids))

    def prepare(self, plan: SchedulerOutput) -> StepInputs:
        """The step's inputs, decodes first; advances the computed counts."""
        order = self._order(plan)
        rows_B = order.rows_B
        before_B = self.num_computed[rows_B]
        seq_lens_B = before_B + order.counts_B
        self.num_computed[rows_B] = seq_lens_B
        positions_T = before_B[order.source_T] + order.offset_T
        blocks_T = self.blocks.ids[order.rows_T, positions_T // self.block_size]
        slots_T = blocks_T.astype(np.int64) * self.block_size + positions_T % self.block_size

        positions = self._to_device(positions_T)
        samples_B = seq_lens_B == self.num_tokens[rows_B]
        all_sample = bool(samples_B.all())
        return StepInputs(
            token_ids_T=self._token_ids(order, positions_T, positions),
            attention=AttentionMetadata(
                num_decodes=order.num_decodes,
                query_start=order.query_start,
                seq_lens=seq_lens_B.tolist(),
                seq_lens_B=self._to_device(seq_lens_B.astype(np.int32)),
                block_table_BM=self.blocks.select(rows_B, plan.group),
                positions_T=positions,
                slot_mapping_T=self._to_device(slots_T),
            ),
            sample_index_R=order.last_token_B
            if all_sample
            else order.last_token_B[self._to_device(samples_B)],
            # The order's own array if all sample, by which `sampling_metadata` knows it again.
            sample_rows=rows_B if all_sample else rows_B[samples_B],
            sample_positions=seq_lens_B if all_sample else seq_lens_B[samples_B],
        )

    def _token_ids(
        self, order: _Order, positions_T: NDArray[np.int64], positions: Tensor
    ) -> Tensor:
        """Of the step's tokens, int64 on the device; positions: the same on the host and there."""
        if self._host_tokens is None:
            return self.token_table[order.table_rows_T, positions].long()
        return torch.from_numpy(self._host_tokens[order.rows_T, positions_T].astype(np.int64))

    def sampling_metadata(self, rows: NDArray[np.int64]) -> SamplingMetadata:
        """How these rows sample."""
        if self._sampling is None or self._sampling[0] is not rows:
            metadata = SamplingMetadata.of_rows(
                self.greedy[rows], self.temperature[rows], self.top_k[rows], self.top_p[rows],
                self.min_p[rows], self.seed[rows], self.vocab_size, self.device,
            )  # fmt: skip
            self._sampling = rows, metadata
        return self._sampling[1]

    def append(self, rows: NDArray[np.integer], token_ids_R: Tensor) -> None:
        """Give each of these rows the token it sampled, on the device."""
        if self._host_tokens is not None:
            self._host_tokens[rows, self.num_tokens[rows]] = token_ids_R.numpy()
        else:
            index = self._to_device(rows), self._to_device(self.num_tokens[rows])
            self.token_table[index] = token_ids_R.to(torch.int32)
        self.num_tokens[rows] += 1

    def take_sampled(self, plan: SchedulerOutput) -> None:
        """Append what a later stage sampled; before `apply`, for rows may be removed with it."""
        rows = _ints(plan.sampled_rows).astype(np.int64)
        if len(rows):
            self.append(rows, self._to_device(_ints(plan.sampled_token_ids)))

    def _order(self, plan: SchedulerOutput) -> _Order:
        """Rows and tokens of this step."""
        if plan.chunk_rows:
            return self._make_order(plan)
        order = self._decode_orders.get(plan.group)
        if order is None:
            order = self._decode_orders[plan.group] = self._make_order(plan)
        return order

    def _make_order(self, plan: SchedulerOutput) -> _Order:
        counts = (self.is_active & (self.group == plan.group)).astype(np.int64)
        counts[_ints(plan.chunk_rows)] = _ints(plan.chunk_counts)
        decodes = np.flatnonzero(counts == 1)
        rows_B = np.concatenate((decodes, np.flatnonzero(counts > 1)))
        counts_B = counts[rows_B]
        ends_B = np.cumsum(counts_B)
        num_tokens = int(ends_B[-1]) if len(ends_B) else 0
        assert num_tokens == plan.num_tokens, (
            f"step {plan.step}: {num_tokens} tokens, not as planned"
        )
        source_T = np.repeat(np.arange(len(rows_B)), counts_B)
        rows_T = rows_B[source_T]
        return _Order(
            num_decodes=len(decodes),
            rows_B=rows_B,
            counts_B=counts_B,
            rows_T=rows_T,
            source_T=source_T,
            offset_T=np.arange(num_tokens) - (ends_B - counts_B)[source_T],
            query_start=[0, *ends_B.tolist()],
            table_rows_T=self._to_device(rows_T),
            last_token_B=self._to_device(ends_B - 1),
        )

    def _add(self, new: NewRow) -> None:
        row, sampling = new.row, new.sampling
        token_ids, block_ids = _ints(new.token_ids), _ints(new.block_ids)
        assert not self.is_active[row], f"row {row} is taken"
        self.is_active[row] = True
        self.token_table[row, : len(token_ids)] = self._to_device(token_ids)
        self.num_tokens[row] = len(token_ids)
        self.num_computed[row] = new.num_computed_tokens
        self.blocks.set_row(row, block_ids)
        self.greedy[row] = sampling.greedy
        self.temperature[row] = min(sampling.temperature, _MAX_FLOAT32)
        top_k_off = sampling.top_k <= 0
        self.top_k[row] = self.vocab_size if top_k_off else min(sampling.top_k, self.vocab_size)
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.seed[row] = new.seed

    def _to_device(self, values: NDArray) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def _ints(column: bytes) -> NDArray[np.int32]:
    # A copy, because torch warns of numpy arrays that it could not write to.
    return np.frombuffer(column, _TOKEN_DTYPE).copy()
