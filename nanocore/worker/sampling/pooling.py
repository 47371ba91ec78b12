"""Embeddings: hidden states of prompt tokens after the last norm, of one or the mean of several.

They are added up in integers, exactly, chunk by chunk: a mean has the same bits however its prompt
was cut into chunks, whoever ran beside it, and in whatever order a device adds. A number is split
into two with a fixed point; together they keep 2**-56 and hold millions of tokens. Shape suffixes:
see `nanocore.kernels.interface`; further, N tokens of K rows.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.worker.plan import NewRow

MAX_TOKENS: Final = 128
"""Added up at once: it bounds memory."""

_HIGH, _LOW = 2.0**16, 2.0**40
_LIMIT: Final = 2.0**23
"""No norm gives such numbers: from here on they count as not finite."""


class PooledRow(msgspec.Struct):
    """A row's tokens from position start to stop, and the sum over those whose steps are done."""

    row: int
    start: int
    stop: int
    sums: NDArray[np.int64] | int = 0

    def mean(self) -> NDArray[np.float32]:
        """Mean of all tokens, [E]; NaN if some hidden state is not finite."""
        assert not isinstance(self.sums, int), "there is a token at least"
        high, low = np.split(self.sums[:-1], 2)
        mean = (high / _HIGH + low / (_HIGH * _LOW)) / (self.stop - self.start)
        return np.where(self.sums[-1] == 0, mean, np.nan).astype("<f4")


class StepPooling(msgspec.Struct, frozen=True):
    """Contribution of a step to the sums of rows.

    columns: int64 [2, N], which of the step's T tokens, and which of the K rows it belongs to.
    done: of each row, whether that is all.
    """

    columns: NDArray[np.int64]
    rows: list[PooledRow]
    done: list[bool]

    def take(self, sums_KI: NDArray[np.int64]) -> tuple[bytes, bytes]:
        """Add what `pooled_sums` found; (rows, embeddings) of those that are done, as columns."""
        rows, means = [], []
        for pooled, sums_I, is_done in zip(self.rows, sums_KI, self.done, strict=True):
            pooled.sums = pooled.sums + sums_I
            if is_done:
                rows.append(pooled.row)
                means.append(pooled.mean().tobytes())
        return np.array(rows, "<i4").tobytes(), b"".join(means)


class PoolingRows:
    """The rows of the persistent batch that are to have an embedding, and tokens to compute."""

    def __init__(self) -> None:
        self._rows: dict[int, PooledRow] = {}

    @property
    def is_empty(self) -> bool:
        return not self._rows

    def remove(self, rows: NDArray[np.integer]) -> None:
        if self._rows:
            for row in rows.tolist():
                self._rows.pop(row, None)

    def add(self, new: NewRow) -> None:
        if new.sampling.pooling is None:
            return
        stop = new.num_prompt_tokens
        start = 0 if new.sampling.pooling == "mean" else stop - 1
        assert new.num_computed_tokens <= start, (
            f"row {new.row}: {new.num_computed_tokens} tokens are computed, and it needs those "
            f"from {start} on"
        )
        self._rows[new.row] = PooledRow(new.row, start, stop)

    def of_step(
        self, rows_B: NDArray[np.int64], counts_B: NDArray[np.int64], seq_lens_B: NDArray[np.int64]
    ) -> StepPooling | None:
        """Select the tokens of a step that are pooled: see `BatchStep` and `StepOrder`.

        To be asked once for each step, in order: a row is forgotten with its last token.
        """
        if not self._rows:
            return None
        offsets_B = np.cumsum(counts_B) - seq_lens_B  # from a position to one of the T
        columns: list[NDArray[np.int64]] = []
        rows: list[PooledRow] = []
        done: list[bool] = []
        for i, row in enumerate(rows_B.tolist()):
            pooled = self._rows.get(row)
            if pooled is None:
                continue
            stop = int(seq_lens_B[i])
            positions = np.arange(max(stop - int(counts_B[i]), pooled.start), stop)
            if len(positions) == 0:
                continue
            columns.append(np.stack((positions + offsets_B[i], np.full_like(positions, len(rows)))))
            rows.append(pooled)
            done.append(stop == pooled.stop)
            if done[-1]:
                del self._rows[row]
        return StepPooling(np.concatenate(columns, axis=1), rows, done) if rows else None


def pooled_sums(hidden_NE: Tensor, row_N: Tensor, num_rows: int, scale: float = 1.0) -> Tensor:
    """The sums of each row's hidden states, int64 [K, 2E + 1]; last, how many are not finite.

    row_N: int64, which of the K. scale: hidden states are multiplied by it.
    """
    size = 2 * hidden_NE.shape[1] + 1
    sums_KI = hidden_NE.new_zeros((num_rows, size), dtype=torch.int64)
    for start in range(0, len(hidden_NE), MAX_TOKENS):
        some = slice(start, start + MAX_TOKENS)
        x_NE = hidden_NE[some].double() * scale
        is_bad_NE = ~(x_NE.abs() < _LIMIT)  # NaN is not
        x_NE = x_NE.masked_fill_(is_bad_NE, 0.0).mul_(_HIGH)
        high_NE = x_NE.trunc()
        low_NE = x_NE.sub_(high_NE).mul_(_LOW)
        num_bad_N1 = is_bad_NE.any(dim=1, keepdim=True).double()
        numbers_NI = torch.cat((high_NE, low_NE, num_bad_N1), dim=1).long()
        sums_KI.index_add_(0, row_N[some], numbers_NI)
    return sums_KI
