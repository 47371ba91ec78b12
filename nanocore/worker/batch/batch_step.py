"""A step as the persistent batch lays it out: its order, positions, slots and inputs.

Shape suffixes: see `nanocore.kernels.interface`.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.kernels.attention import AttentionMetadata
from nanocore.kernels.step import StepRows
from nanocore.worker.plan import SchedulerOutput

_INT32 = np.dtype("<i4")


class StepInputs(msgspec.Struct, frozen=True):
    """Inputs of a step. sample_index_R: which of the T tokens' hidden states sample."""

    rows: StepRows
    attention: AttentionMetadata
    sample_index_R: Tensor


class StepOrder(msgspec.Struct, frozen=True):
    """A step's rows in the order of its tokens, and what follows from their counts alone.

    is_decode_only: these are all rows of the group, with a token each. The order is the same in
    every such step until a row comes or goes, and so is all that follows from it.
    source_T: which of the B each token belongs to; offset_T: its index among its row's tokens.
    last_token_B: the last token of each row. query_start_A, num_decodes_1: as in
    `AttentionMetadata`, on the host.
    """

    is_decode_only: bool
    num_decodes: int
    rows_B: NDArray[np.int64]
    counts_B: NDArray[np.int64]
    rows_T: NDArray[np.int64]
    source_T: NDArray[np.int64]
    offset_T: NDArray[np.int64]
    last_token_B: NDArray[np.int64]
    query_start: list[int]
    query_start_A: Tensor
    num_decodes_1: Tensor

    @classmethod
    def of_plan(cls, plan: SchedulerOutput, decodes: NDArray[np.bool_]) -> StepOrder:
        """Lay out a plan's rows. decodes: rows that take one token unless the plan differs."""
        counts = decodes.astype(np.int64)
        counts[ints(plan.chunk_rows)] = ints(plan.chunk_counts)
        # Decodes first, as attention wants them. A chunk of one token is a decode, too.
        single = np.flatnonzero(counts == 1)
        rows_B = np.concatenate((single, np.flatnonzero(counts > 1)))
        counts_B = counts[rows_B]
        ends_B = np.cumsum(counts_B)
        num_tokens = int(ends_B[-1]) if len(ends_B) else 0
        assert num_tokens == plan.num_tokens, (
            f"step {plan.step}: {num_tokens} tokens, not as planned"
        )
        source_T = np.repeat(np.arange(len(rows_B)), counts_B)
        starts = np.concatenate(([0], ends_B))
        return cls(
            is_decode_only=not plan.chunk_rows,
            num_decodes=len(single),
            rows_B=rows_B,
            counts_B=counts_B,
            rows_T=rows_B[source_T],
            source_T=source_T,
            offset_T=np.arange(num_tokens) - starts[source_T],
            last_token_B=ends_B - 1,
            query_start=starts.tolist(),
            query_start_A=torch.from_numpy(starts.astype(np.int32)),
            num_decodes_1=torch.tensor([len(single)], dtype=torch.int32),
        )


class BatchStep(msgspec.Struct, frozen=True):
    """One step's rows, positions and slots, on the host.

    group: of the plan. all_sample: every row of the order does. seq_lens_B: contexts with this
    step's tokens. slots_T: where their K and V go. sample_index_R: which of the T tokens sample;
    sample_rows: their rows; sample_positions: the positions that the sampled tokens will take.
    Arrays are int64.
    """

    group: int
    order: StepOrder
    all_sample: bool
    seq_lens_B: NDArray[np.int64]
    positions_T: NDArray[np.int64]
    slots_T: NDArray[np.int64]
    sample_index_R: NDArray[np.int64]
    sample_rows: NDArray[np.int64]
    sample_positions: NDArray[np.int64]


def ints(column: bytes) -> NDArray[np.int32]:
    """A plan's column of int32, as an array of its own."""
    # A copy, because torch warns of numpy arrays that it could not write to.
    return np.frombuffer(column, _INT32).copy()


def running_counts(rows: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return for each entry how many entries before it are of the same row."""
    order = rows.argsort(kind="stable")
    is_first = np.diff(rows[order], prepend=-1) != 0
    starts = np.maximum.accumulate(np.where(is_first, np.arange(len(rows)), 0))
    counts = np.empty(len(rows), np.int64)
    counts[order] = np.arange(len(rows)) - starts
    return counts
