"""Qwen1.5-MoE and Qwen2-MoE (technical report, 2024): Qwen2 with experts.

Beside the experts that the router chooses there is one that every token passes, behind a gate of
its own (shared experts: DeepSeekMoE, Dai et al. 2024).
"""

from __future__ import annotations

from torch import Tensor

from nanocore.kernels.interface import SharedExpert
from nanocore.worker.config.family import Family
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.config.windows import window_if_asked
from nanocore.worker.layers.context import StepContext
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.layers.mlp import GatedMLP
from nanocore.worker.layers.moe import SparseDecoderLayer, SparseMLP
from nanocore.worker.layers.packing import Projection, Weight, WeightPacker
from nanocore.worker.loading.weights import Entries
from nanocore.worker.placement import Placement


class SharedExpertMLP(SparseMLP):
    """Experts, and sigmoid(gate(x)) times the shared one, in one sum over ranks."""

    def __init__(self, placement: Placement, config: ModelConfig) -> None:
        super().__init__(placement, config)
        assert config.moe is not None, "only families with experts have sparse layers"
        self.shared_expert = GatedMLP(
            placement, config, config.moe.shared_intermediate_size,
            "shared_expert_intermediate_size",
        )  # fmt: skip
        self.shared_gate = Weight(placement, 1, config.hidden_size)

    def entries(self, prefix: str) -> Entries:
        gate = Projection.whole(f"{prefix}shared_expert_gate", 1, self.shared_gate.in_features)
        return {
            **super().entries(prefix),
            **self.shared_expert.entries(f"{prefix}shared_expert."),
            **self.shared_gate.entries(gate),
        }

    def pack(self, packer: WeightPacker) -> None:
        super().pack(packer)
        self.shared_expert.pack(packer)
        self.shared_gate.pack(packer.unquantized)

    def shared(self, x_TE: Tensor, context: StepContext) -> SharedExpert:
        gate_T1 = context.kernels.linear(x_TE, self.shared_gate.packed)
        return SharedExpert(gate_T1, self.shared_expert.partial_sum(x_TE, context))


class Qwen2MoeLayer(SparseDecoderLayer):
    """Its experts are not alone."""

    sparse_mlp = SharedExpertMLP


class Qwen2MoeModel(DecoderModel):
    """Checkpoints use the common names."""

    family = Family(
        num_kv_heads=16,
        bias_setting="qkv_bias",
        attention_bias=True,
        window=window_if_asked(lambda layer, limit: layer % 2 == 0 and layer < limit),
        free_layer_types=True,
        sparse=True,
        shared_expert=True,
    )
    layer_class = Qwen2MoeLayer
