"""Gemma 2 (technical report, 2024): norms on both sides of attention and MLP, capped logits.

Every other layer has a window. Norm weights are stored less one, and embeddings are scaled.
"""

from __future__ import annotations

from torch import Tensor

from nanocore.kernels.interface import KVCache
from nanocore.worker.config.family import Family, Softcap
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.config.windows import window_with_gaps
from nanocore.worker.layers.context import StepContext
from nanocore.worker.layers.decoder import DecoderLayer, DecoderModel
from nanocore.worker.layers.norm import RMSNorm
from nanocore.worker.loading.weights import Entries
from nanocore.worker.placement import Placement


class Gemma2Layer(DecoderLayer):
    """What attention and MLP add to the residual is normed, as is what they get."""

    def make_norms(self, placement: Placement, config: ModelConfig) -> None:
        super().make_norms(placement, config)
        self.pre_feedforward_norm = RMSNorm(placement, config, config.hidden_size)
        self.post_feedforward_norm = RMSNorm(placement, config, config.hidden_size)

    def norm_entries(self, prefix: str) -> Entries:
        return {
            **super().norm_entries(prefix),
            **self.pre_feedforward_norm.entries(f"{prefix}pre_feedforward_layernorm"),
            **self.post_feedforward_norm.entries(f"{prefix}post_feedforward_layernorm"),
        }

    def __call__(
        self, x_TE: Tensor, residual_TE: Tensor | None, cache: KVCache, context: StepContext
    ) -> tuple[Tensor, Tensor]:
        kernels = context.kernels
        x_TE, residual_TE = self.input_norm.add(x_TE, residual_TE, kernels)
        x_TE = self.post_attention_norm(self.attention(x_TE, cache, context), kernels)
        x_TE, residual_TE = self.pre_feedforward_norm.add(x_TE, residual_TE, kernels)
        return self.post_feedforward_norm(self.mlp(x_TE, context), kernels), residual_TE


class Gemma2Model(DecoderModel):
    """Its checkpoints use the common names for the rest."""

    family = Family(
        num_kv_heads=4,
        head_dim=256,
        tie_word_embeddings=True,
        eos_token_id=1,
        activation="gelu_pytorch_tanh",
        activation_setting="hidden_activation",
        bias_setting="attention_bias",
        biased_o_proj=True,
        window=window_with_gaps(2, None),
        free_layer_types=True,
        query_pre_attn_scalar=256,
        attn_logit_softcapping=Softcap(50.0),
        final_logit_softcapping=Softcap(30.0),
        scaled_embedding=True,
        norm_offset=1.0,
        fits_float16=False,
    )
    layer_class = Gemma2Layer
