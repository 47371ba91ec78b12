"""What a step is asked for beside tokens: log probabilities, and embeddings; on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.worker.sampling.logprob_rows import LogprobEntries
from nanocore.worker.sampling.pooling import StepPooling


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
    def is_nothing(self) -> bool:
        """Whether the step is asked for tokens alone."""
        return self.sampled is None and not self.needs_hidden

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
