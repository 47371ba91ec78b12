"""Qwen3-MoE (technical report, 2025): Qwen3 with experts in place of most layers' MLPs."""

from __future__ import annotations

from nanocore.worker.config.family import Family
from nanocore.worker.config.windows import window_if_asked
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.layers.moe import SparseDecoderLayer


class Qwen3MoeModel(DecoderModel):
    """Checkpoints use the common names."""

    family = Family(
        num_kv_heads=4,
        bias_setting="attention_bias",
        biased_o_proj=True,
        window=window_if_asked(lambda _layer, _limit: True),
        qk_norm=True,
        sparse=True,
    )
    layer_class = SparseDecoderLayer
