"""The vocabulary's two ends, split by token ids over tensor parallel ranks.

A rank looks up and scores the tokens of its range only; ranges are equal but for the last, so any
vocabulary can be split.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from nanocore.worker.loading.weights import Part
from nanocore.worker.placement import Placement


class VocabParallelEmbedding:
    """Rows of the embedding, or of the head, for token ids from first_token on."""

    def __init__(self, placement: Placement, vocab_size: int, hidden_size: int) -> None:
        self.tp = placement.tp
        range_size = -(-vocab_size // self.tp.size)
        self.first_token = min(self.tp.rank * range_size, vocab_size)
        self.num_tokens = min(range_size, vocab_size - self.first_token)
        self.weight = placement.empty(self.num_tokens, hidden_size)

    def parts(self) -> list[Part]:
        """What this rank keeps of the checkpoint's matrix."""
        rows = slice(self.first_token, self.first_token + self.num_tokens)
        return [Part(self.weight, (rows,))]

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """Embeddings, [T, E]."""
        if self.tp.size == 1:
            return F.embedding(token_ids_T, self.weight)
        local_T = token_ids_T - self.first_token
        is_elsewhere_T = (local_T < 0) | (local_T >= self.num_tokens)
        x_TE = F.embedding(local_T.masked_fill(is_elsewhere_T, 0), self.weight)
        return self.tp.all_reduce(x_TE.masked_fill(is_elsewhere_T[:, None], 0))

    def logits(self, hidden_RE: Tensor) -> Tensor:
        """Logits of this rank's tokens, float32 [R, num_tokens]."""
        return F.linear(hidden_RE, self.weight).float()
