"""Token masks of a step's rows: from the engine's message to the sampler's operands.

On a device the masks are staged, in the order in which they stand here, and copied once. Shape
suffixes: see `nanocore.kernels.logit_edits`; further, K rows that are sampled anew.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.kernels.logit_edits import TokenMask
from nanocore.worker.plan import TokenMasks

_ALIGNMENT: Final = 16
"""In bytes, of each part of staged memory: see `device.step_memory`."""


class MaskedRows(msgspec.Struct, frozen=True):
    """Masks of some of the R rows that a step samples, on the host.

    words_MW: int32, read only. index_R: int32, -1 of rows without a mask. plain_K: int64, which of
    the R have one and ask for nothing else.
    """

    words_MW: NDArray[np.int32]
    index_R: NDArray[np.int32]
    plain_K: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        masks: TokenMasks,
        sample_rows: NDArray[np.int64],
        processed: NDArray[np.int64],
        vocab_size: int,
    ) -> MaskedRows | None:
        """None: every row may sample any token.

        sample_rows: [R], rows of the persistent batch. processed: see `columns.SampledRows`.
        """
        rows, words = np.frombuffer(masks.rows, "<i4"), np.frombuffer(masks.words, "<i4")
        num_words = -(-vocab_size // 32)
        assert len(words) == len(rows) * num_words, (
            f"step {masks.step}: {len(words)} words of masks of {len(rows)} rows, which have "
            f"{num_words} each"
        )
        if len(rows) == 0:
            return None
        index_of_row = np.full(max(sample_rows.max(initial=-1), rows.max()) + 1, -1)
        index_of_row[sample_rows] = np.arange(len(sample_rows))
        index_M = index_of_row[rows]
        unknown = rows[index_M < 0].tolist()
        assert not unknown, f"step {masks.step}: masks of rows {unknown}, which it does not sample"
        index_R = np.full(len(sample_rows), -1, np.int32)
        index_R[index_M] = np.arange(len(rows))
        assert (index_R >= 0).sum() == len(rows), f"step {masks.step}: a row has two masks"
        is_plain_R = index_R >= 0
        is_plain_R[processed] = False
        return cls(words.reshape(-1, num_words), index_R, is_plain_R.nonzero()[0])

    def on_host(self) -> TokenMask:
        """Masks for kernels that run on the host."""
        # A copy, because torch warns of numpy arrays that it could not write to.
        return TokenMask(torch.from_numpy(self.words_MW.copy()), torch.from_numpy(self.index_R))

    @property
    def num_bytes(self) -> int:
        return self._ends()[-1]

    def write(self, staged: Tensor) -> None:
        """Write to uint8 memory on the host, of at least num_bytes."""
        for part, column in zip(self._split(staged), self._parts(), strict=True):
            part.numpy()[:] = column.ravel()

    def of_staged(self, memory: Tensor) -> tuple[TokenMask, Tensor]:
        """(the masks, plain_K) of what was written, in its memory or that of a copy."""
        words, index_R, plain_K = self._split(memory)
        return TokenMask(words.view(self.words_MW.shape), index_R), plain_K

    def _parts(self) -> tuple[NDArray, ...]:
        return self.words_MW, self.index_R, self.plain_K

    def _ends(self) -> list[int]:
        sizes = [-(-part.nbytes // _ALIGNMENT) * _ALIGNMENT for part in self._parts()]
        return np.cumsum(sizes).tolist()

    def _split(self, memory: Tensor) -> list[Tensor]:
        starts = [0, *self._ends()]
        dtypes = torch.int32, torch.int32, torch.int64
        return [
            memory[start : start + part.nbytes].view(dtype)
            for start, part, dtype in zip(starts, self._parts(), dtypes, strict=False)
        ]
