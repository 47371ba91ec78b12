"""What a step is asked for beside tokens: log probabilities, and embeddings; on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.worker.plan import NewRow
from nanocore.worker.sampling.pooling import PoolingRows, StepPooling


@dataclass(frozen=True, slots=True)
class Asked:
    """Nothing where it is None.

    sampled: of tokens that the step samples; one column, which of the R rows. prompt: of tokens of
    prompts; columns: which of the T tokens is before it, its row, its position. pooled: of prompts
    that are to have an embedding; columns: see there.
    """

    sampled: LogprobEntries | None = None
    prompt: LogprobEntries | None = None
    pooled: StepPooling | None = None

    @property
    def needs_hidden(self) -> bool:
        """Whether hidden states are needed beside those that tokens are sampled from."""
        return self.prompt is not None or self.pooled is not None

    @property
    def column(self) -> NDArray[np.int64]:
        """All columns, one after the other."""
        parts = (self.sampled, self.prompt, self.pooled)
        return np.concatenate([part.columns.ravel() for part in parts if part is not None])

    def split(self, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The columns of `sampled`, `prompt` and `pooled`, each [c, N], in memory of `column`."""
        parts = (self.sampled, self.prompt, self.pooled)
        sizes = [0 if part is None else part.columns.size for part in parts]
        sampled, prompt, pooled = column.split(sizes)
        return sampled.view(1, -1), prompt.view(3, -1), pooled.view(2, -1)

    def hidden_index(self, column: Tensor) -> Tensor:
        """Which of the T tokens' hidden states are needed, of `prompt` and then of `pooled`."""
        _, prompt_3N, pooled_2N = self.split(column)
        return torch.cat((prompt_3N[0], pooled_2N[0]))


class AskingRows:
    """What the rows of the persistent batch ask for; where none asks nothing is made.

    Args:
        num_rows: of the batch. vocab_size: tokens that there are.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._logprobs = LogprobRows(num_rows, vocab_size)
        self._pooling = PoolingRows()

    @property
    def is_empty(self) -> bool:
        """No row asks for anything."""
        return self._logprobs.is_empty and self._pooling.is_empty

    def remove(self, rows: NDArray[np.integer]) -> None:
        """These rows are free."""
        self._logprobs.remove(rows)
        self._pooling.remove(rows)

    def add(self, new: NewRow) -> None:
        """A free row is taken."""
        self._logprobs.add(new)
        self._pooling.add(new)

    def asked(
        self,
        rows_R: NDArray[np.int64],
        steady_group: int | None,
        rows_B: NDArray[np.int64],
        counts_B: NDArray[np.int64],
        seq_lens_B: NDArray[np.int64],
    ) -> Asked | None:
        """What a step is asked for, once, in the steps' order: see `LogprobRows`, `PoolingRows`."""
        sampled = self._logprobs.sampled(rows_R, steady_group)
        prompt = self._logprobs.prompt(rows_B, counts_B, seq_lens_B)
        pooled = self._pooling.of_step(rows_B, counts_B, seq_lens_B)
        if sampled is None and prompt is None and pooled is None:
            return None
        return Asked(sampled, prompt, pooled)


MAX_ROWS: Final = 64
"""Whose logits are looked at together, beside those that are sampled from: it bounds memory."""

_NOT_ASKED: Final = -1
_FEW: Final = 63
"""Up to so many tokens, numbers make no difference."""


@dataclass(frozen=True, slots=True)
class Group:
    """Entries from start to stop, in the order in which they are computed, with num_top tokens."""

    start: int
    stop: int
    num_top: int

    def slices(self) -> Iterator[slice]:
        """All of them, at most MAX_ROWS at a time."""
        for start in range(self.start, self.stop, MAX_ROWS):
            yield slice(start, min(start + MAX_ROWS, self.stop))


class LogprobEntries:
    """Tokens whose log probabilities are computed; arrays are int64.

    Args:
        rows: [N], whose they are. num_top: [N], how many of the most likely tokens each asks for.
        columns: [c, N], numbers that a device must know of each.

    order: [N], the entries in the order in which they are computed, group by group; columns are in
    that order. rows and num_top are in the order in which they are told.
    """

    def __init__(
        self, rows: NDArray[np.int64], num_top: NDArray[np.int64], columns: NDArray[np.int64]
    ) -> None:
        self.rows, self.num_top = rows, num_top
        sizes = np.frexp(np.maximum(num_top, _FEW))[1]  # of a group, at most twice the least
        self.order = sizes.argsort(kind="stable")
        self.columns = columns[:, self.order]
        starts = np.flatnonzero(np.diff(sizes[self.order], prepend=-1)).tolist()
        ordered = num_top[self.order]
        self.groups = [
            Group(start, stop, int(ordered[start:stop].max()))
            for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _Prompt:
    """start, stop: positions whose logits are still needed; those of the tokens behind them."""

    num_top: int
    start: int
    stop: int


class LogprobRows:
    """What the rows of the persistent batch ask for.

    Args:
        num_rows: of the batch. vocab_size: tokens that there are.
    """

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_top = np.full(num_rows, _NOT_ASKED, np.int64)
        self._num_asking = 0
        self._prompts: dict[int, _Prompt] = {}
        self._kept: dict[int, LogprobEntries | None] = {}
        """What `sampled` says of steady steps, by group."""

    @property
    def is_empty(self) -> bool:
        """No row asks for anything."""
        return not (self._num_asking or self._prompts)

    def remove(self, rows: NDArray[np.integer]) -> None:
        """These rows are free."""
        self._kept.clear()
        if self._num_asking:
            self._num_asking -= int((self._num_top[rows] != _NOT_ASKED).sum())
            self._num_top[rows] = _NOT_ASKED
        if self._prompts:
            for row in rows.tolist():
                self._prompts.pop(row, None)

    def add(self, new: NewRow) -> None:
        """A free row is taken."""
        self._kept.clear()
        if new.sampling.logprobs is not None:
            self._num_top[new.row] = self._number(new.sampling.logprobs)
            self._num_asking += 1
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
        self, rows_R: NDArray[np.int64], steady_group: int | None = None
    ) -> LogprobEntries | None:
        """Of the tokens that these rows sample. steady_group: they are all rows of this group."""
        if not self._num_asking:
            return None
        if steady_group is not None and steady_group in self._kept:
            return self._kept[steady_group]
        num_top_R = self._num_top[rows_R]
        index = np.flatnonzero(num_top_R != _NOT_ASKED)
        entries = None
        if len(index):
            entries = LogprobEntries(rows_R[index], num_top_R[index], index[None])
        if steady_group is not None:
            self._kept[steady_group] = entries
        return entries

    def prompt(
        self, rows_B: NDArray[np.int64], counts_B: NDArray[np.int64], seq_lens_B: NDArray[np.int64]
    ) -> LogprobEntries | None:
        """Of prompt tokens behind those that a step computes: see `BatchStep` and `Order`.

        To be asked once for each step, in order: a row is done with its prompt's last token.
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
        return LogprobEntries(
            np.concatenate(rows), np.concatenate(num_top), np.concatenate(columns, axis=1)
        )

    def _number(self, asked: int) -> int:
        return self._vocab_size if asked < 0 else min(asked, self._vocab_size)
