"""What a step is asked for beside tokens: log probabilities, and embeddings; on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.worker.plan import NewRow
from nanocore.worker.sampling.logprob_rows import LogprobEntries, LogprobRows
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
