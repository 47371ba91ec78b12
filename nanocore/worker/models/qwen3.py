"""Qwen3 (technical report, 2025): the common layer, with QK-norm; later ones may have a window."""

from __future__ import annotations

from nanocore.worker.config.family import Family
from nanocore.worker.config.windows import window_if_asked
from nanocore.worker.layers.decoder import DecoderModel


class Qwen3Model(DecoderModel):
    """Checkpoints use the common names."""

    family = Family(
        num_kv_heads=32,
        head_dim=128,
        bias_setting="attention_bias",
        biased_o_proj=True,
        window=window_if_asked(lambda layer, limit: layer >= limit),
        free_layer_types=True,
        qk_norm=True,
    )
