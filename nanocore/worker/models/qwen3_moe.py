"""Qwen3-MoE (technical report, 2025): Qwen3 with experts in place of most layers' MLPs."""

from __future__ import annotations

from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.layers.decoder import MLP, DecoderLayer, DecoderModel
from nanocore.worker.layers.moe import SparseMLP
from nanocore.worker.placement import Placement


class Qwen3MoeLayer(DecoderLayer):
    """Dense or sparse, as the configuration says."""

    def make_mlp(self, placement: Placement, config: ModelConfig, layer: int) -> MLP:
        if config.moe and layer in config.moe.sparse_layers:
            return SparseMLP(placement, config)
        return super().make_mlp(placement, config, layer)


class Qwen3MoeModel(DecoderModel):
    """Checkpoints use the common names."""

    layer_class = Qwen3MoeLayer
