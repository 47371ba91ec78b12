"""Edits of logits and token masks that rows request, as kernels take them.

All of it is a function of what a row requests and of the tokens that it holds: nothing is kept from
step to step, so it does not matter what else ran, or whether the row was here before. Masks are
read in the sampling kernels, before temperature and filters, so that logits need not be written.
Shape suffixes: see `interface`; further, N entries of a list, M masks of W words.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor


class TokenLists(msgspec.Struct, frozen=True):
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
        parts = dict(zip(cls.__struct_fields__, column.split(sizes), strict=True))
        parts["biases_N"] = parts["biases_N"].view(torch.float32)
        return cls(**parts)

    @property
    def num_rows(self) -> int:
        return len(self.allowed_starts_A) - 1


class LogitEdits(msgspec.Struct, frozen=True):
    """Edits of the logits of R rows; see `SamplingKernels.edit_logits`.

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


class TokenMask(msgspec.Struct, frozen=True):
    """Masks of R rows, where the logits are.

    words_MW: int32, contiguous; token t may be sampled if bit t % 32 of word t // 32 is set, 0
    being the lowest bit. There are words for the whole vocabulary, whatever part of it logits are
    of. index_R: int32, which of the masks a row has; -1: none, it may sample any token.
    """

    words_MW: Tensor
    index_R: Tensor

    def of_rows(self, rows: Tensor) -> TokenMask:
        return TokenMask(self.words_MW, self.index_R.index_select(0, rows))

    def is_allowed(self, first_token: int, num_tokens: int) -> Tensor:
        """Bool [R, num_tokens], of tokens from first_token on; the reference for kernels."""
        words_MW, index_R = self.words_MW, self.index_R.long()
        if len(words_MW) == 0:
            return index_R.new_ones((len(index_R), num_tokens), dtype=torch.bool)
        token_V = torch.arange(first_token, first_token + num_tokens, device=words_MW.device)
        words_RV = words_MW[index_R.clamp(min=0)][:, token_V // 32]
        allowed_RV = (words_RV >> (token_V % 32).int()) & 1 == 1
        return allowed_RV | (index_R < 0)[:, None]
