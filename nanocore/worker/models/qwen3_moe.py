"""Qwen3-MoE (technical report, 2025): Qwen3 with experts in place of most layers' MLPs."""

from __future__ import annotations

from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.layers.moe import SparseDecoderLayer


class Qwen3MoeModel(DecoderModel):
    """Checkpoints use the common names."""

    layer_class = SparseDecoderLayer
