"""OLMo 2 (Ai2, 2024): norms only of what attention and MLP add, and of Q and K as wholes.

Q and K are normed over all heads of a token, which tensor parallel ranks share. Weights of norms
are multiplied in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from nanocore.kernels.states import LayerCache
from nanocore.worker.config.config_json import ConfigReader
from nanocore.worker.config.model_config import AttentionConfig, ModelConfig
from nanocore.worker.layers.attention import Attention
from nanocore.worker.layers.decoder import DecoderLayer, DecoderModel
from nanocore.worker.layers.linear import RowShard, StepContext
from nanocore.worker.layers.norm import Norm, RMSNorm
from nanocore.worker.loading.weights import Entries
from nanocore.worker.placement import Placement


class Olmo2Norm(RMSNorm):
    """Rounds once, after the product with the weight."""

    dtype = torch.float32


class Olmo2Attention(Attention):
    """Norms Q and K before they are heads."""

    def __init__(
        self,
        placement: Placement,
        config: AttentionConfig,
        hidden_size: int,
        layer: int,
        make_norm: Callable[[int], Norm],
    ) -> None:
        super().__init__(placement, config, hidden_size, layer, make_norm)
        self.tp = placement.tp
        q_rows, k_rows, _ = self.qkv_proj.parts
        self.whole_q_norm, self.whole_k_norm = make_norm(q_rows.total), make_norm(k_rows.total)

    def entries(self, prefix: str) -> Entries:
        return {
            **super().entries(prefix),
            **self.whole_q_norm.entries(f"{prefix}q_norm"),
            **self.whole_k_norm.entries(f"{prefix}k_norm"),
        }

    def project(self, x_TE: Tensor, context: StepContext) -> Tensor:
        qkv = super().project(x_TE, context)
        q_rows, k_rows, v_rows = self.qkv_proj.parts
        of_ranks = self.tp.all_gather(qkv[:, : -v_rows.size])
        q, k = of_ranks.split((q_rows.size, k_rows.size), dim=2)
        q = self.whole_q_norm(_joined(q, q_rows), context.kernels)[:, q_rows.kept]
        k = self.whole_k_norm(_joined(k, k_rows), context.kernels)[:, k_rows.kept]
        return torch.cat((q, k, qkv[:, -v_rows.size :]), dim=1)


def _joined(of_ranks: Tensor, rows: RowShard) -> Tensor:
    """A projection as a whole, [T, total], from every rank's part, [ranks, T, size]."""
    times_kept = len(of_ranks) * rows.size // rows.total  # KV heads may be on several ranks
    return of_ranks[::times_kept].transpose(0, 1).flatten(1)


class Olmo2Layer(DecoderLayer):
    """Attention and MLP get the stream as it is."""

    attention_class = Olmo2Attention
    norm_class = Olmo2Norm

    norms: ClassVar[dict[str, str]] = {
        "post_attention_norm": "post_attention_layernorm",
        "post_feedforward_norm": "post_feedforward_layernorm",
    }
    post_feedforward_norm: Norm

    def __call__(
        self, x_TE: Tensor, residual_TE: Tensor | None, cache: LayerCache, context: StepContext
    ) -> tuple[Tensor, Tensor]:
        kernels = context.kernels
        x_TE = x_TE if residual_TE is None else x_TE + residual_TE
        residual_TE = x_TE
        x_TE = self.post_attention_norm(self.mixer(x_TE, cache, context), kernels)
        residual_TE = residual_TE + x_TE
        return self.post_feedforward_norm(self.mlp(residual_TE, context), kernels), residual_TE


class Olmo2Model(DecoderModel):
    layer_class = Olmo2Layer

    @classmethod
    def read(cls, reader: ConfigReader) -> ModelConfig:
        attention = reader.attention(bias=reader.flag("attention_bias"))
        return reader.model(attention, reader.mlp(), rms_norm_eps=1e-5, eos_token_id=50279)
