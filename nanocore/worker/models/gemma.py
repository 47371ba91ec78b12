"""Gemma (technical report, 2024): Llama's layer with a gelu, Gemma's norms and scaled embeddings.

Norm weights are stored less one. Later Gemmas have more norms.
"""

from __future__ import annotations

from nanocore.worker.config.family import Family
from nanocore.worker.config.settings import Settings
from nanocore.worker.config.windows import no_window
from nanocore.worker.layers.decoder import DecoderModel

_GELU = "gelu_pytorch_tanh"


def _translate(settings: Settings) -> Settings:
    """The first files say gelu, and mean its tanh approximation; later ones say so by two names."""
    if settings.get("hidden_activation", str, _GELU) != _GELU:
        raise settings.error("hidden_activation", f"is not implemented; known: {_GELU}")
    if settings.get("hidden_act", str, _GELU) != "gelu":
        return settings
    return settings.with_values(settings.values | {"hidden_act": _GELU})


class GemmaModel(DecoderModel):
    """Checkpoints use the common names."""

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
