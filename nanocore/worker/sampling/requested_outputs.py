"""Outputs that rows request beside tokens: log probabilities and embeddings; on the host.

Where no row requests any, nothing is made. What follows from which rows decode is kept for as long
as they do. Requests for about as many tokens are computed together, so that a row which wants the
whole vocabulary costs its neighbours nothing.

An embedding is the hidden state of one prompt token after the last norm, or the mean of several.
They are added up in integers, exactly, chunk by chunk: a mean has the same bits however its prompt
was cut into chunks, whoever ran beside it, and in whatever order a device adds. A number is split
into two with a fixed point; together they keep 2**-56 and hold millions of tokens.

Shape suffixes: see `nanocore.kernels.interface`; further, N entries, each of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.worker.plan import NewRow

MAX_ROWS: Final = 64
"""Rows whose logits are computed together, besides those that sample: it bounds memory."""

_NOT_REQUESTED: Final = -1
_FEW: Final = 63
"""Up to this many tokens a request's size makes no difference."""
MAX_POOLED_TOKENS: Final = 128
"""Added up at once: it bounds memory."""

_HIGH, _LOW = 2.0**16, 2.0**40
_LIMIT: Final = 2.0**23
"""No norm gives such numbers: from here on they count as not finite."""


class RequestedOutputs(msgspec.Struct, frozen=True):
    """Nothing where it is None.

    sampled: of tokens that the step samples; one column, which of the R rows. prompt: of tokens of
    prompts; columns: which of the T tokens is before it, its row, its position. pooled: of prompts
    that are to have an embedding; columns: see there.
    """

    sampled: LogprobRequests | None = None
    prompt: LogprobRequests | None = None
    pooled: StepPooling | None = None

    @property
    def needs_hidden(self) -> bool:
        return self.prompt is not None or self.pooled is not None

    @property
    def column(self) -> NDArray[np.int64]:
        parts = (self.sampled, self.prompt, self.pooled)
        return np.concatenate([part.columns.ravel() for part in parts if part is not None])

    def split(self, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The columns of `sampled`, `prompt` and `pooled`, each [c, N], in memory of `column`."""
        parts = (self.sampled, self.prompt, self.pooled)
        sizes = [0 if part is None else part.columns.size for part in parts]
        sampled, prompt, pooled = column.split(sizes)
        return sampled.view(1, -1), prompt.view(3, -1), pooled.view(2, -1)

    def hidden_index(self, column: Tensor) -> Tensor:
        """Indices in T of the hidden states that are needed, of `prompt` and then of `pooled`."""
        _, prompt_3N, pooled_2N = self.split(column)
        return torch.cat((prompt_3N[0], pooled_2N[0]))


class RequestedOutputRows:
    """Requests of the persistent batch's rows; where no row has one, nothing is made.

    Args:
        num_rows: of the batch. vocab_size: tokens that there are.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._logprobs = LogprobRows(num_rows, vocab_size)
        self._pooling = PoolingRows()

    @property
    def is_empty(self) -> bool:
        return self._logprobs.is_empty and self._pooling.is_empty

    def remove(self, rows: NDArray[np.integer]) -> None:
        self._logprobs.remove(rows)
        self._pooling.remove(rows)

    def add(self, new: NewRow) -> None:
        self._logprobs.add(new)
        self._pooling.add(new)

    def requested(
        self,
        rows_R: NDArray[np.int64],
        decode_group: int | None,
        rows_B: NDArray[np.int64],
        counts_B: NDArray[np.int64],
        seq_lens_B: NDArray[np.int64],
    ) -> RequestedOutputs | None:
        """Requests of a step; call once, in the steps' order: see `LogprobRows`, `PoolingRows`."""
        sampled = self._logprobs.sampled(rows_R, decode_group)
        prompt = self._logprobs.prompt(rows_B, counts_B, seq_lens_B)
        pooled = self._pooling.of_step(rows_B, counts_B, seq_lens_B)
        if sampled is None and prompt is None and pooled is None:
            return None
        return RequestedOutputs(sampled, prompt, pooled)


class LogprobGroup(msgspec.Struct, frozen=True):
    """Entries from start to stop, in the order in which they are computed, with num_top tokens."""

    start: int
    stop: int
    num_top: int

    def slices(self) -> Iterator[slice]:
        for start in range(self.start, self.stop, MAX_ROWS):
            yield slice(start, min(start + MAX_ROWS, self.stop))


class LogprobRequests:
    """Tokens whose log probabilities are computed; arrays are int64.

    Args:
        rows: [N], whose they are. num_top: [N], how many of the most likely tokens each asks for.
        columns: [c, N], numbers that a device must know of each.

    order: [N], the entries in the order in which they are computed, group by group; columns are in
    that order. rows and num_top are in the order of the output.
    """

    def __init__(
        self, rows: NDArray[np.int64], num_top: NDArray[np.int64], columns: NDArray[np.int64]
    ) -> None:
        self.rows = rows
        self.num_top = num_top
        sizes = np.frexp(np.maximum(num_top, _FEW))[1]  # of a group, at most twice the least
        self.order = sizes.argsort(kind="stable")
        self.columns = columns[:, self.order]
        starts = np.flatnonzero(np.diff(sizes[self.order], prepend=-1)).tolist()
        ordered = num_top[self.order]
        self.groups = [
            LogprobGroup(start, stop, int(ordered[start:stop].max()))
            for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True)
        ]


class _Prompt(msgspec.Struct, frozen=True):
    """A prompt with requested log probabilities. start, stop: positions whose logits are needed."""

    num_top: int
    start: int
    stop: int


class LogprobRows:
    """Log probabilities that the rows of the persistent batch request.

    Args:
        num_rows: of the batch. vocab_size: tokens that there are.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_top = np.full(num_rows, _NOT_REQUESTED, np.int64)
        self._num_requesting = 0
        self._prompts: dict[int, _Prompt] = {}
        self._kept: dict[int, LogprobRequests | None] = {}
        """What `sampled` says of steady steps, by group."""

    @property
    def is_empty(self) -> bool:
        return not (self._num_requesting or self._prompts)

    def remove(self, rows: NDArray[np.integer]) -> None:
        self._kept.clear()
        if self._num_requesting:
            self._num_requesting -= int((self._num_top[rows] != _NOT_REQUESTED).sum())
            self._num_top[rows] = _NOT_REQUESTED
        if self._prompts:
            for row in rows.tolist():
                self._prompts.pop(row, None)

    def add(self, new: NewRow) -> None:
        self._kept.clear()
        if new.sampling.logprobs is not None:
            self._num_top[new.row] = self._number(new.sampling.logprobs)
            self._num_requesting += 1
        start, stop = new.num_prompt_logprobs, new.num_prompt_tokens - 1
        if new.sampling.prompt_logprobs is None or start >= stop:
            return
        assert new.num_computed_tokens <= start, (
            f"row {new.row}: {new.num_computed_tokens} tokens are computed, of which "
            f"{start} have prompt log probabilities"
        )
        number = self._number(new.sampling.prompt_logprobs)
        self._prompts[new.row] = _Prompt(number, start, stop)

    def sampled(
        self, rows_R: NDArray[np.int64], decode_group: int | None = None
    ) -> LogprobRequests | None:
        """Requests for these rows' sampled tokens. decode_group: they are all its rows."""
        if not self._num_requesting:
            return None
        if decode_group is not None and decode_group in self._kept:
            return self._kept[decode_group]
        num_top_R = self._num_top[rows_R]
        index = np.flatnonzero(num_top_R != _NOT_REQUESTED)
        entries = None
        if len(index):
            entries = LogprobRequests(rows_R[index], num_top_R[index], index[None])
        if decode_group is not None:
            self._kept[decode_group] = entries
        return entries

    def prompt(
        self, rows_B: NDArray[np.int64], counts_B: NDArray[np.int64], seq_lens_B: NDArray[np.int64]
    ) -> LogprobRequests | None:
        """Requests for prompt tokens behind those that a step computes: see `BatchStep`.

        Call once for each step, in order: a row is done with its prompt's last token.
        """
        if not self._prompts:
            return None
        starts_B = seq_lens_B - counts_B
        offsets_B = np.cumsum(counts_B) - counts_B - starts_B  # from a position to one of the T
        rows, num_top, columns = [], [], []
        for i, row in enumerate(rows_B.tolist()):
            prompt = self._prompts.get(row)
            if prompt is None:
                continue
            stop = int(seq_lens_B[i])
            computed = np.arange(max(int(starts_B[i]), prompt.start), min(stop, prompt.stop))
            rows.append(np.full(len(computed), row))
            num_top.append(np.full(len(computed), prompt.num_top))
            columns.append(np.stack((computed + offsets_B[i], rows[-1], computed + 1)))
            if stop >= prompt.stop:
                del self._prompts[row]
        if not any(map(len, rows)):
            return None
        return LogprobRequests(
            np.concatenate(rows), np.concatenate(num_top), np.concatenate(columns, axis=1)
        )

    def _number(self, requested: int) -> int:
        return self._vocab_size if requested < 0 else min(requested, self._vocab_size)


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
    for start in range(0, len(hidden_NE), MAX_POOLED_TOKENS):
        some = slice(start, start + MAX_POOLED_TOKENS)
        x_NE = hidden_NE[some].double() * scale
        is_bad_NE = ~(x_NE.abs() < _LIMIT)  # NaN is not
        x_NE = x_NE.masked_fill_(is_bad_NE, 0.0).mul_(_HIGH)
        high_NE = x_NE.trunc()
        low_NE = x_NE.sub_(high_NE).mul_(_LOW)
        num_bad_N1 = is_bad_NE.any(dim=1, keepdim=True).double()
        numbers_NI = torch.cat((high_NE, low_NE, num_bad_N1), dim=1).long()
        sums_KI.index_add_(0, row_N[some], numbers_NI)
    return sums_KI
