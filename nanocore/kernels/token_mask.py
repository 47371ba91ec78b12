"""Which tokens rows may sample, as bits: what a grammar leaves of the vocabulary.

A mask says nothing of why. It is looked at in the sampling kernels, before temperature and filters,
so that logits need not be written. Shape suffixes: see `interface`; further, M masks of W words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Masks of R rows, where the logits are.

    words_MW: int32, contiguous; token t may be sampled if bit t % 32 of word t // 32 is set, 0
    being the lowest bit. There are words for the whole vocabulary, whatever part of it logits are
    of. index_R: int32, which of the masks a row has; -1: none, it may sample any token.
    """

    words_MW: Tensor
    index_R: Tensor

    def of_rows(self, rows: Tensor) -> TokenMask:
        """The masks of these of the R rows; rows: int64 indices."""
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
