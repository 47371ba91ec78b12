"""Gemma, Gemma 2 and Gemma 3 (technical reports, 2024 and 2025): gelu, scaled embeddings.

Norm weights are stored less one. Of models that also see images the text part is served.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import torch
from msgspec.structs import replace
from torch import Tensor

from nanocore.kernels.states import LayerCache
from nanocore.worker.config.config_json import ConfigReader, Windows
from nanocore.worker.config.json_settings import Settings
from nanocore.worker.config.model_config import AttentionConfig, ModelConfig, OffsetNormConfig
from nanocore.worker.config.rope_config import LAYER_TYPES, THETA, Ropes, read_rotation
from nanocore.worker.layers.decoder import DecoderLayer, DecoderModel
from nanocore.worker.layers.linear import StepContext
from nanocore.worker.layers.norm import Norm, OffsetNorm
from nanocore.worker.models.text_part import TextModelPart, read_text_config
from nanocore.worker.placement import Placement

_GELU = "gelu_pytorch_tanh"


class GemmaConfig(OffsetNormConfig, frozen=True, kw_only=True):
    """logits_softcap: see `Kernels.logits`."""

    logits_softcap: float = 0.0


class GemmaLayer(DecoderLayer):
    norm_class: ClassVar[type[Norm]] = OffsetNorm


class GemmaModel(DecoderModel):
    """Gemma: Llama's layer with a gelu."""

    layer_class = GemmaLayer

    def __init__(self, config: GemmaConfig, placement: Placement) -> None:
        super().__init__(config, placement)
        # Rounded as in training, where the factor had the model's dtype.
        self.embedding_factor = torch.tensor(config.hidden_size**0.5, dtype=placement.dtype).item()
        self.logits_softcap = config.logits_softcap

    @classmethod
    def read(cls, reader: ConfigReader) -> ModelConfig:
        # The first files say gelu and mean its tanh approximation; later ones say so by two names.
        settings, name = reader.settings, "hidden_act"
        if settings.get("hidden_activation", str, _GELU) != _GELU:
            raise settings.error("hidden_activation", f"is not implemented; known: {_GELU}")
        if settings.get(name, str, _GELU) == "gelu":
            name = "hidden_activation"
        bias = reader.flag("attention_bias")
        attention = reader.attention(num_kv_heads=16, head_dim=256, bias=bias)
        return _read_model(reader, attention, name)


class Gemma2Layer(GemmaLayer):
    """Norms on both sides: of the input and of the output of attention and of the MLP."""

    norms: ClassVar[dict[str, str]] = {
        **DecoderLayer.norms,
        "pre_feedforward_norm": "pre_feedforward_layernorm",
        "post_feedforward_norm": "post_feedforward_layernorm",
    }
    pre_feedforward_norm: Norm
    post_feedforward_norm: Norm

    def __call__(
        self, x_TE: Tensor, residual_TE: Tensor | None, cache: LayerCache, context: StepContext
    ) -> tuple[Tensor, Tensor]:
        kernels = context.kernels
        x_TE, residual_TE = self.input_norm.add(x_TE, residual_TE, kernels)
        x_TE = self.post_attention_norm(self.mixer(x_TE, cache, context), kernels)
        x_TE, residual_TE = self.pre_feedforward_norm.add(x_TE, residual_TE, kernels)
        return self.post_feedforward_norm(self.mlp(x_TE, context), kernels), residual_TE


class Gemma2Model(GemmaModel):
    """Gemma 2: capped logits, and a window in every other layer."""

    layer_class = Gemma2Layer

    @classmethod
    def read(cls, reader: ConfigReader) -> ModelConfig:
        softcap = reader.softcap("attn_logit_softcapping", 50.0)
        return _read(reader, 30.0, windows=_windows(reader, 2), softcap=softcap)


class Gemma3Model(Gemma2Model):
    """Gemma 3: Gemma 2's layer with QK-norm and no caps; windowed layers rotate differently."""

    @classmethod
    def read(cls, reader: ConfigReader) -> ModelConfig:
        windows = _windows(reader, reader.settings.size("sliding_window_pattern", 6))
        config = _read(reader, None, windows=windows, rope=_read_rope, qk_norm=True)
        length = reader.settings.size("max_position_embeddings")  # it is already stretched
        return replace(config, max_model_len=length, longest_model_len=length)


def _windows(reader: ConfigReader, period: int) -> Windows:
    window = reader.settings.nullable("sliding_window", int, 4096)
    return window, lambda layer: (layer + 1) % period != 0


def _read_rope(settings: Settings, head_dim: int) -> Ropes:
    """Two rotations: a long one for full attention, a short one for the window.

    Each has an object of its own, or else the older settings have two names for the base.
    """
    nested = settings.section("rope_parameters")
    for key in nested.values:
        if key not in LAYER_TYPES:
            raise nested.error(key, f"is not one of Gemma 3's layer types: {LAYER_TYPES}")
    full = nested.section("full_attention")
    old = settings.section("rope_scaling")
    if old.values:
        full = old.with_values(full.values | old.values)
    full_theta = settings.number("rope_theta", 1_000_000.0, THETA)
    local_theta = settings.number("rope_local_base_freq", 10_000.0, THETA)
    local = nested.section("sliding_attention")
    return {
        "full_attention": read_rotation(settings, full, head_dim, full_theta),
        "sliding_attention": read_rotation(settings, local, head_dim, local_theta),
    }


def _read(reader: ConfigReader, logits_softcap: float | None, **own: Any) -> ModelConfig:
    """Gemma 2 or 3. logits_softcap: the default. own: of its attention."""
    attention = reader.attention(
        num_kv_heads=4,
        head_dim=256,
        bias=reader.flag("attention_bias"),
        scale=reader.settings.size("query_pre_attn_scalar", 256) ** -0.5,
        free_layer_types=True,
        **own,
    )
    softcap = reader.softcap("final_logit_softcapping", logits_softcap)
    return _read_model(
        reader, attention, "hidden_activation", fits_float16=False, logits_softcap=softcap
    )


def _read_model(
    reader: ConfigReader, attention: AttentionConfig, activation: str, **own: Any
) -> ModelConfig:
    return reader.model(
        attention,
        reader.mlp(activation, _GELU),
        GemmaConfig,
        tie_word_embeddings=True,
        eos_token_id=1,
        norms_are_whole=reader.is_gguf,
        **own,
    )


_TEXT_DEFAULTS: Final[dict[str, Any]] = {
    "vocab_size": 262_208, "num_attention_heads": 8, "max_position_embeddings": 131_072,
}  # fmt: skip
"""Settings that published files leave out, in addition to the family's own defaults."""


class Gemma3ImageTextModel(TextModelPart, Gemma3Model):
    """The text part of a Gemma 3 that also sees images."""

    @classmethod
    def translate(cls, settings: Settings) -> Settings:
        return read_text_config(settings, {"gemma3_text": _TEXT_DEFAULTS})[1]
