"""A step as the persistent batch lays it out: its order, its positions and its sample slots.

Shape suffixes: see `nanocore.kernels.interface`; further, S sample slots, M masks of W words.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from nanocore.worker.plan import SchedulerOutput, TokenMasks


class StepOrder(msgspec.Struct, frozen=True):
    """A step's rows in the order of its tokens, and what follows from their counts alone.

    is_decode_only: these are all rows of the group, with a token each. The order is the same in
    every such step until a row comes or goes, and so is all that follows from it.
    source_T: which of the B each token belongs to; offset_T: its index among its row's tokens.
    last_token_B: the last token of each row. query_start, query_start_A: see `AttentionMetadata`.
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
    query_start_A: NDArray[np.int64]

    @classmethod
    def of_plan(
        cls, plan: SchedulerOutput, decodes: NDArray[np.bool_], decode_tokens: int = 1
    ) -> StepOrder:
        """Lay out a plan's rows. decodes: rows that take one token unless the plan differs.

        decode_tokens: the most that a row takes to be a decode for kernels.
        """
        counts = decodes.astype(np.int64)
        counts[ints(plan.chunk_rows)] = ints(plan.chunk_counts)
        # Decodes first, as attention wants them. A chunk of as few tokens is a decode, too.
        few = np.flatnonzero((counts > 0) & (counts <= decode_tokens))
        rows_B = np.concatenate((few, np.flatnonzero(counts > decode_tokens)))
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
            num_decodes=len(few),
            rows_B=rows_B,
            counts_B=counts_B,
            rows_T=rows_B[source_T],
            source_T=source_T,
            offset_T=np.arange(num_tokens) - starts[source_T],
            last_token_B=ends_B - 1,
            query_start=starts.tolist(),
            query_start_A=starts,
        )


class BatchStep(msgspec.Struct, frozen=True):
    """One step's rows, positions and sample slots, on the host; arrays are int64.

    group: of the plan. all_sample: every row of the order has one sample slot. seq_lens_B: contexts
    with this step's tokens. slots_GT: where K and V of the T tokens go, by group of layers.

    sampling_rows: rows that sample, each once; slot_counts: how many sample slots each has, one
    more than it has drafts. Of each slot, a row's in their order: sample_index, which of the T
    tokens it is sampled behind; sample_rows, its row; sample_positions, the position that the
    sampled token takes. lanes: see there. num_drafts_B: tokens at a row's end that are drafts.
    """

    group: int
    order: StepOrder
    all_sample: bool
    seq_lens_B: NDArray[np.int64]
    positions_T: NDArray[np.int64]
    slots_GT: NDArray[np.int64]
    sampling_rows: NDArray[np.int64]
    slot_counts: NDArray[np.int64]
    sample_index: NDArray[np.int64]
    sample_rows: NDArray[np.int64]
    sample_positions: NDArray[np.int64]
    num_drafts_B: NDArray[np.int64]
    lanes: dict[str, NDArray] = {}

    @property
    def has_drafts(self) -> bool:
        return len(self.sample_rows) > len(self.sampling_rows)


class MaskedSlots(msgspec.Struct, frozen=True):
    """Masks of some of the S slots, on the host.

    words_MW: int32, read only. index_S: int32, -1 of slots without a mask.
    """

    words_MW: NDArray[np.int32]
    index_S: NDArray[np.int32]

    @classmethod
    def of(
        cls, masks: TokenMasks, sample_rows: NDArray[np.int64], vocab_size: int
    ) -> MaskedSlots | None:
        """None: every slot may sample any token.

        sample_rows: [S], the slots' rows of the persistent batch.
        """
        rows, words = np.frombuffer(masks.rows, "<i4"), np.frombuffer(masks.words, "<i4")
        num_words = -(-vocab_size // 32)
        assert len(words) == len(rows) * num_words, (
            f"step {masks.step}: {len(words)} words of masks of {len(rows)} rows, which have "
            f"{num_words} each"
        )
        if len(rows) == 0:
            return None
        # A mask's slot has its row, and the same place among the row's.
        slots, masked = (_numbered(column) for column in (sample_rows, rows))
        order = slots.argsort()
        found = order[slots.searchsorted(masked, sorter=order).clip(max=len(slots) - 1)]
        unknown = rows[slots[found] != masked].tolist()
        assert not unknown, f"step {masks.step}: masks of rows {unknown}, more than it samples"
        index_S = np.full(len(sample_rows), -1, np.int32)
        index_S[found] = np.arange(len(rows))
        return cls(words.reshape(-1, num_words), index_S)


def ints(column: bytes) -> NDArray[np.int32]:
    """A plan's column of int32, as an array of its own."""
    # A copy, because torch warns of numpy arrays that it could not write to.
    return np.frombuffer(column, "<i4").copy()


@lru_cache(maxsize=512)
def zeros(length: int) -> NDArray[np.int64]:
    """Zeros in the same array for all that want so many: not to be written to."""
    return np.zeros(length, np.int64)


def running_counts(rows: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return for each entry how many entries before it are of the same row."""
    order = rows.argsort(kind="stable")
    is_first = np.diff(rows[order], prepend=-1) != 0
    starts = np.maximum.accumulate(np.where(is_first, np.arange(len(rows)), 0))
    counts = np.empty(len(rows), np.int64)
    counts[order] = np.arange(len(rows)) - starts
    return counts


def _numbered(rows: NDArray[np.integer]) -> NDArray[np.int64]:
    """A number for each entry, of its row and its place among those of the row."""
    return (rows.astype(np.int64) << 32) + running_counts(rows)
