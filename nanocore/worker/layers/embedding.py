"""The vocabulary's two ends, split by token ids over tensor parallel ranks.

A rank looks up and scores the tokens of its range only; ranges are equal but for the last, so any
vocabulary can be split.
"""

from __future__ import annotations

from torch import Tensor

from nanocore.kernels.interface import Kernels
from nanocore.kernels.linear_weight import TokenEmbedding
from nanocore.kernels.step_rows import StepRows
from nanocore.worker.layers.packing import Projection, Weight, WeightPacker
from nanocore.worker.loading.weights import Entries
from nanocore.worker.placement import Placement


class VocabParallelEmbedding:
    """Rows of the embedding, or of the head, for token ids from first_token on."""

    def __init__(self, placement: Placement, vocab_size: int, hidden_size: int) -> None:
        self.tp = placement.tp
        self.shape = vocab_size, hidden_size
        range_size = -(-vocab_size // self.tp.size)
        self.first_token = min(self.tp.rank * range_size, vocab_size)
        self.num_tokens = min(range_size, vocab_size - self.first_token)
        self.dtype = placement.dtype
        self.weight = Weight(placement, self.num_tokens, hidden_size)

    def entries(self, name: str) -> Entries:
        """Where the checkpoint's matrix of this name goes."""
        rows = slice(self.first_token, self.first_token + self.num_tokens)
        return self.weight.entries(Projection(name, self.shape, rows, slice(0, self.shape[1])))

    def pack(self, packer: WeightPacker) -> None:
        """See `Weight`; for `embed` and `logits`."""
        self.weight.pack(packer.head)

    def pack_as_embedding(self, packer: WeightPacker) -> None:
        """See `Weight`; where nothing but `embed` needs it."""
        self.weight.pack(packer.embedding)

    def embed(self, token_ids_T: Tensor, factor: float, kernels: Kernels) -> Tensor:
        """Embeddings times factor, [T, E]."""
        x_TE = kernels.embedding(token_ids_T, self._tokens(factor))
        return x_TE if self.tp.size == 1 else kernels.all_reduce(x_TE, self.tp)

    def begin_step(self, rows: StepRows, factor: float, kernels: Kernels) -> tuple[Tensor, Tensor]:
        """(block ids of the step's sequences, what `embed` says of its tokens)."""
        block_table_BM, x_TE = kernels.begin_step(rows, self._tokens(factor))
        assert x_TE is not None, "with an embedding there are hidden states"
        return block_table_BM, x_TE if self.tp.size == 1 else kernels.all_reduce(x_TE, self.tp)

    def logits(self, hidden_RE: Tensor, softcap: float, kernels: Kernels) -> Tensor:
        """Logits of this rank's tokens, float32 [R, num_tokens]; see `Kernels.logits`."""
        return kernels.logits(hidden_RE, self.weight.packed, softcap)

    def _tokens(self, factor: float) -> TokenEmbedding:
        return TokenEmbedding(self.weight.packed, self.first_token, factor, self.dtype)
