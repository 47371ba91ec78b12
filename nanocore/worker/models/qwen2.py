"""Qwen2 and Qwen2.5 (technical reports, 2024): the common layer, with biases of Q, K and V.

Later layers may have a window.
"""

from __future__ import annotations

from nanocore.worker.config.family import Family
from nanocore.worker.config.windows import window_if_asked
from nanocore.worker.layers.decoder import DecoderModel


class Qwen2Model(DecoderModel):
    """Checkpoints use the common names."""

    family = Family(
        num_kv_heads=32,
        attention_bias=True,
        window=window_if_asked(lambda layer, limit: layer >= limit),
        free_layer_types=True,
    )
