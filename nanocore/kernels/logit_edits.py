"""What rows ask to be done to their logits before a token is chosen, as kernels take it.

All of it is a function of what a row asks for and of the tokens that it holds: nothing is kept from
step to step, so it does not matter what else ran, or whether the row was here before. Shape
suffixes: see `interface`; further, N entries of a list.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLists:
    """Token ids that R rows name, row behind row; int32, but for biases, which are float32.

    starts (A = R + 1): of each row the first entry, and behind the last row the number of entries.
    allowed: rows without any allow all. biases: of biased_ids, of which a row has each once. stops:
    forbidden at first. bad: tokens of sequences, which bad_starts (one more than there are
    sequences) separates; sequence_starts_A counts sequences.
    """

    allowed_starts_A: Tensor
    allowed_N: Tensor
    bias_starts_A: Tensor
    biased_N: Tensor
    biases_N: Tensor
    stop_starts_A: Tensor
    stops_N: Tensor
    sequence_starts_A: Tensor
    bad_starts: Tensor
    bad_N: Tensor

    @classmethod
    def of(cls, column: Tensor, sizes: list[int]) -> TokenLists:
        """Views of one int32 column that holds them all, in the order above; sizes: of each."""
        parts = dict(zip((f.name for f in fields(cls)), column.split(sizes), strict=True))
        parts["biases_N"] = parts["biases_N"].view(torch.float32)
        return cls(**parts)

    @property
    def num_rows(self) -> int:
        return len(self.allowed_starts_A) - 1


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """What is done to logits of R rows; see `interface.Kernels.edit_logits`.

    token_table: int32 [rows, L]; rows_R: int64, which of its rows. num_prompt_tokens_R,
    num_tokens_R: int64, how many tokens a row's prompt has, and the row in all; what is behind
    them in the table means nothing, and a token below 0 is none. min_tokens_R: int32, how many
    output tokens there are to be before a stop. Penalties: float32; 1, 0 and 0 are off.
    """

    token_table: Tensor
    rows_R: Tensor
    num_prompt_tokens_R: Tensor
    num_tokens_R: Tensor
    min_tokens_R: Tensor
    repetition_penalty_R: Tensor
    frequency_penalty_R: Tensor
    presence_penalty_R: Tensor
    lists: TokenLists
