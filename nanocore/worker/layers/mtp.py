"""A layer beside a model's own that guesses the tokens after the next one: an MTP head.

Of a token and of the model's last hidden state for the token before it, it makes a hidden state for
the token after it (DeepSeek-V3, 2024). It has K and V of its own. Those of a token lie at its
position, though its first input is known a step earlier: so they depend on no later token, and a
prefix that hits has them. In each step they are computed for all of the step's tokens, from what
the model has just computed; guesses write them as well, and are written over by that.

A sequence's first token has none before it, nor has the first one after a prefix hit: of these K
and V are zeros. Shape suffixes: see `nanocore.kernels.interface`.
"""

from __future__ import annotations

from torch import Tensor

from nanocore.kernels.interface import Kernels
from nanocore.kernels.states import LayerCache
from nanocore.worker.layers.attention import Attention
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.layers.linear import ColumnParallelLinear, RowShard, StepContext
from nanocore.worker.layers.packing import WeightPacker
from nanocore.worker.loading.weights import EMBEDDING, HEAD, MTP_PREFIX, Entries


class MultiTokenPredictor(DecoderModel):
    """The layer as a model of its own, with the embedding and the head of the one it guesses for.

    `forward` is a pass: a token of each row, behind what the row has of `before_RKE`.

    rounds_head: with a copy of the head in eight bits. Most of what a pass reads is the head, and a
    guess that this changes costs a draft at worst.

    kept_RKE: of each row, hidden states of the last token of its last step, and of its drafts.
    before_RKE: likewise [rows, 1, E] of the token before the one that a pass is given.
    """

    def __init__(self, target: DecoderModel, rounds_head: bool = False) -> None:
        config, placement = target.config, target.placement
        self.config, self.placement = config, placement
        self._target = target
        self._rounded_head = self._vocabulary(placement) if rounds_head else None
        self.embedding, self.head = target.embedding, self._rounded_head or target.head
        self.embedding_factor, self.logits_softcap = target.embedding_factor, target.logits_softcap
        # It is made like the last layer that has attention.
        number = max(i for i, one in enumerate(target.layers) if isinstance(one.mixer, Attention))
        self.layer = target.layer_class(placement, config, number)
        self.layers = [self.layer]
        norms = (target._norm(placement) for _ in range(3))
        self.last_norm, self.token_norm, self.hidden_norm = norms
        size = config.hidden_size
        self.fc = ColumnParallelLinear(placement, 2 * size, [RowShard(size, 0, size)])

    def entries(self) -> Entries:
        head = Entries()
        if self._rounded_head is not None:
            head = self._rounded_head.entries(self._head_name.removesuffix(".weight"))
        return {
            **head,
            **self.fc.entries(f"{MTP_PREFIX}fc"),
            **self.layer.entries(f"{MTP_PREFIX}layers.0."),
            **self.last_norm.entries(f"{MTP_PREFIX}norm"),
            **self.token_norm.entries(f"{MTP_PREFIX}pre_fc_norm_embedding"),
            **self.hidden_norm.entries(f"{MTP_PREFIX}pre_fc_norm_hidden"),
        }

    @property
    def _head_name(self) -> str:
        return EMBEDDING if self.config.tie_word_embeddings else HEAD

    def entry_name(self, stored: str) -> str | None:
        if stored.startswith(MTP_PREFIX):
            return stored
        is_head = self._target.entry_name(stored) == self._head_name
        return self._head_name if is_head and self._rounded_head is not None else None

    def pack(self, packer: WeightPacker) -> None:
        if self._rounded_head is not None:
            self._rounded_head.weight.pack(packer.rounded)
        self.fc.pack(packer)
        self.layer.pack(packer)

    def allocate(self, cache: LayerCache, num_rows: int, max_drafts: int) -> None:
        """Begin anew, with rows that have no tokens. cache: of the layer."""
        placement, size = self.placement, self.config.hidden_size
        self._cache = cache
        self.kept_RKE = placement.empty(num_rows, 1 + max_drafts, size).zero_()
        self.before_RKE = placement.empty(num_rows, 1, size).zero_()

    def normed_tokens(self, x_TE: Tensor, kernels: Kernels) -> Tensor:
        """What of a step's embeddings `follow` is to be given: layers write over them."""
        return self.token_norm(x_TE, kernels)

    def follow(self, tokens_TE: Tensor, hidden_TE: Tensor, context: StepContext) -> None:
        """Store K and V of a step's tokens. hidden_TE: the model's last hidden states, normed."""
        hidden_TE = self.hidden_norm(hidden_TE, context.kernels)
        x_TE = self._join(tokens_TE, hidden_TE, self.kept_RKE, context)
        context.kernels.keep_last(hidden_TE, self.kept_RKE, context.metadata[0])
        x_TE, _ = self.layer.input_norm.add(x_TE, None, context.kernels)
        self.layer.mixer.store(x_TE, self._cache, context)

    def forward(
        self, x_TE: Tensor, caches: list[LayerCache], context: StepContext, sample_index_R: Tensor
    ) -> Tensor:
        kernels = context.kernels
        tokens_TE = self.normed_tokens(x_TE, kernels)
        x_TE = self._join(tokens_TE, tokens_TE, self.before_RKE, context)
        x_TE, residual_TE = self.layer(x_TE, None, caches[0], context)
        hidden_TE, _ = self.last_norm.add(x_TE, residual_TE, kernels)
        before_TE = self.hidden_norm(hidden_TE, kernels)
        kernels.keep_last(before_TE, self.before_RKE, context.metadata[0])
        return kernels.select(hidden_TE, sample_index_R)

    def _join(
        self, tokens_TE: Tensor, hidden_TE: Tensor, before_RKE: Tensor, context: StepContext
    ) -> Tensor:
        metadata = context.metadata[0]
        joined = context.kernels.join_previous(tokens_TE, hidden_TE, before_RKE, metadata)
        return self.fc(joined, context)
