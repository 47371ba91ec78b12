"""Token masks of a step's sample slots: from the engine's message to the sampler's columns.

Shape suffixes: see `nanocore.kernels.logit_edits`; further, S sample slots.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from nanocore.worker.plan import TokenMasks, running_counts


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


def _numbered(rows: NDArray[np.integer]) -> NDArray[np.int64]:
    """A number for each entry, of its row and its place among those of the row."""
    return (rows.astype(np.int64) << 32) + running_counts(rows)
