"""The persistent batch: every running row's state, kept between steps and changed by differences.

A row is fixed for as long as its request runs, and is the same in the engine and on every rank.
Counts and block tables are numpy columns on the host; the token table lives on the device, where
sampled tokens are written, so a step's inputs never wait for the host to see them. Preparing a step
is vectorised: no Python loop over tokens or rows. Shape suffixes: see `nanocore.kernels.backend`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.kernels.backend import AttentionMetadata, SamplingMetadata
from nanocore.protocol.plan import NewRow, SchedulerOutput

_TOKEN_DTYPE = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a step computes. token_ids_T, positions_T: int64 on the device.

    sample_index_R: which of the T tokens' hidden states sample. sample_rows: their rows, on the
    host; sample_positions: the positions the sampled tokens will take.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    attention: AttentionMetadata
    sample_index_R: Tensor
    sample_rows: NDArray[np.int64]
    sample_positions: NDArray[np.int64]


class InputBatch:
    """State of all rows.

    Args:
        max_num_seqs: rows. max_model_len: tokens per row at most. block_size: tokens per KV block.
        vocab_size: the value of top_k where it is off. device: where the model runs.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.device = device
        self.token_table = torch.zeros(
            max_num_seqs, max_model_len, dtype=torch.int32, device=device
        )
        self.block_table = np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.is_active = np.zeros(max_num_seqs, bool)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.greedy = np.zeros(max_num_seqs, bool)
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int32)
        self.top_p = np.zeros(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.seed = np.zeros(max_num_seqs, np.int64)

    def apply(self, plan: SchedulerOutput) -> None:
        """Take in a plan's differences: rows removed, rows added, blocks appended."""
        self.is_active[_ints(plan.removed_rows)] = False
        for new in plan.added:
            self._add(new)
        rows = _ints(plan.block_rows)
        if len(rows):
            # Blocks of one row are adjacent: number them from the start of their run.
            starts = np.flatnonzero(np.diff(rows, prepend=-1))
            lengths = np.diff(starts, append=len(rows))
            offset = np.arange(len(rows)) - np.repeat(starts, lengths)
            self.block_table[rows, self.num_blocks[rows] + offset] = _ints(plan.block_ids)
            self.num_blocks[rows[starts]] += lengths

    def prepare(self, plan: SchedulerOutput) -> StepInputs:
        """The step's inputs, decodes first; advances the computed counts."""
        counts = self.is_active.astype(np.int64)
        counts[_ints(plan.chunk_rows)] = _ints(plan.chunk_counts)
        is_decode = counts == 1
        rows_B = np.concatenate((np.flatnonzero(is_decode), np.flatnonzero(counts > 1)))
        counts_B = counts[rows_B]
        ends_B = np.cumsum(counts_B)
        num_tokens = int(ends_B[-1]) if len(ends_B) else 0
        assert num_tokens == plan.num_tokens, (
            f"step {plan.step}: {num_tokens} tokens, not as planned"
        )

        before_B = self.num_computed[rows_B]
        seq_lens_B = before_B + counts_B
        positions_T = np.arange(num_tokens) + np.repeat(before_B - (ends_B - counts_B), counts_B)
        rows_T = np.repeat(rows_B, counts_B)
        blocks_T = self.block_table[rows_T, positions_T // self.block_size].astype(np.int64)
        slots_T = blocks_T * self.block_size + positions_T % self.block_size
        num_columns = -(-int(seq_lens_B.max(initial=0)) // self.block_size)
        self.num_computed[rows_B] = seq_lens_B

        positions = self._to_device(positions_T)
        samples_B = seq_lens_B == self.num_tokens[rows_B]
        return StepInputs(
            token_ids_T=self.token_table[self._to_device(rows_T), positions].long(),
            positions_T=positions,
            attention=AttentionMetadata(
                num_decodes=int(is_decode.sum()),
                query_start=[0, *ends_B.tolist()],
                seq_lens=seq_lens_B.tolist(),
                seq_lens_B=self._to_device(seq_lens_B.astype(np.int32)),
                block_table_BM=self._to_device(self.block_table[rows_B, :num_columns]),
                slot_mapping_T=self._to_device(slots_T),
            ),
            sample_index_R=self._to_device(ends_B[samples_B] - 1),
            sample_rows=rows_B[samples_B],
            sample_positions=seq_lens_B[samples_B],
        )

    def sampling_metadata(self, inputs: StepInputs) -> SamplingMetadata:
        """How the rows that sample in this step do it."""
        rows = inputs.sample_rows
        greedy, top_k = self.greedy[rows], self.top_k[rows]
        top_p, min_p = self.top_p[rows], self.min_p[rows]
        filters = (top_k < self.vocab_size) | (top_p < 1.0) | (min_p > 0.0)
        return SamplingMetadata(
            all_greedy=bool(greedy.all()),
            filters=bool((filters & ~greedy).any()),
            greedy_R=self._to_device(greedy),
            temperature_R=self._to_device(self.temperature[rows]),
            top_k_R=self._to_device(top_k),
            top_p_R=self._to_device(top_p),
            min_p_R=self._to_device(min_p),
            seed_R=self._to_device(self.seed[rows]),
            position_R=self._to_device(inputs.sample_positions),
        )

    def append_sampled(self, inputs: StepInputs, token_ids_R: Tensor) -> None:
        """Write the sampled tokens to the token table, on the device."""
        rows, positions = inputs.sample_rows, inputs.sample_positions
        self.num_tokens[rows] += 1
        index = self._to_device(rows), self._to_device(positions)
        self.token_table[index] = token_ids_R.to(torch.int32)

    def _add(self, new: NewRow) -> None:
        row, sampling = new.row, new.sampling
        token_ids, block_ids = _ints(new.token_ids), _ints(new.block_ids)
        assert not self.is_active[row], f"row {row} is taken"
        self.is_active[row] = True
        self.token_table[row, : len(token_ids)] = self._to_device(token_ids)
        self.num_tokens[row] = len(token_ids)
        self.num_computed[row] = new.num_computed_tokens
        self.block_table[row, : len(block_ids)] = block_ids
        self.num_blocks[row] = len(block_ids)
        self.greedy[row] = sampling.greedy
        self.temperature[row] = sampling.temperature
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
