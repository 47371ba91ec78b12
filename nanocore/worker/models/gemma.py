"""Gemma, Gemma 2 and Gemma 3 (technical reports, 2024 and 2025): gelu, scaled embeddings.

Norm weights are stored less one. Of models that also see images the text part is served.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace
from torch import Tensor

from nanocore.kernels.attention import KVCache
from nanocore.worker.config.family import Family, Softcap, no_window, window_with_gaps
from nanocore.worker.config.json_settings import Settings
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.layers.decoder import DecoderLayer, DecoderModel
from nanocore.worker.layers.linear import StepContext
from nanocore.worker.layers.norm import RMSNorm
from nanocore.worker.loading.weights import Entries
from nanocore.worker.models.text_part import TextModelPart, read_text_config
from nanocore.worker.placement import Placement

_GELU = "gelu_pytorch_tanh"


def _translate(settings: Settings) -> Settings:
    # The first files say gelu and mean its tanh approximation; later ones say so by two names.
    if settings.get("hidden_activation", str, _GELU) != _GELU:
        raise settings.error("hidden_activation", f"is not implemented; known: {_GELU}")
    if settings.get("hidden_act", str, _GELU) != "gelu":
        return settings
    return settings.with_values(settings.values | {"hidden_act": _GELU})


class GemmaModel(DecoderModel):
    """Gemma: Llama's layer with a gelu."""

    family = Family(
        num_kv_heads=16,
        head_dim=256,
        tie_word_embeddings=True,
        eos_token_id=1,
        activation=_GELU,
        bias_setting="attention_bias",
        biased_o_proj=True,
        window=no_window,
        scaled_embedding=True,
        norm_offset=1.0,
        translate=_translate,
    )


class Gemma2Layer(DecoderLayer):
    """Norms on both sides: of the input and of the output of attention and of the MLP."""

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
    """Gemma 2: capped logits, and a window in every other layer."""

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


class Gemma3Model(Gemma2Model):
    """Gemma 3: Gemma 2's layer with QK-norm and no caps; windowed layers rotate differently."""

    family = replace(
        Gemma2Model.family,
        window=window_with_gaps(6, "sliding_window_pattern"),
        rope_by_layer_type=True,
        attn_logit_softcapping=None,  # transformers' Gemma 3 does not cap attention
        final_logit_softcapping=Softcap(None),
        qk_norm=True,
    )


_TEXT_DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 262_208, "num_attention_heads": 8, "max_position_embeddings": 131_072,
}  # fmt: skip
"""Settings that published files leave out, in addition to the family's own defaults."""


def _translate_text_part(settings: Settings) -> Settings:
    return read_text_config(settings, {"gemma3_text": _TEXT_DEFAULTS})[1]


class Gemma3ImageTextModel(TextModelPart, Gemma3Model):
    """The text part of a Gemma 3 that also sees images."""

    family = replace(Gemma3Model.family, translate=_translate_text_part)
