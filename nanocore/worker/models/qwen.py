"""Qwen2, Qwen2.5 and Qwen3 (technical reports, 2024 and 2025), dense and with experts.

Later layers may have a window.
"""

from __future__ import annotations

from torch import Tensor

from nanocore.kernels.linear import SharedExpert
from nanocore.worker.config.family import Family, window_if_asked
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.layers.linear import StepContext
from nanocore.worker.layers.mlp import GatedMLP
from nanocore.worker.layers.moe import SparseDecoderLayer, SparseMLP
from nanocore.worker.layers.packing import Weight, WeightPacker
from nanocore.worker.loading.weights import Entries, Projection
from nanocore.worker.placement import Placement


class Qwen2Model(DecoderModel):
    """Qwen2 and Qwen2.5: the common layer, with biases of Q, K and V."""

    family = Family(
        num_kv_heads=32,
        attention_bias=True,
        window=window_if_asked(lambda layer, limit: layer >= limit),
        free_layer_types=True,
    )


class SharedExpertMLP(SparseMLP):
    """Routed experts, plus sigmoid(gate(x)) times a shared expert that every token passes.

    Shared experts: DeepSeekMoE (Dai et al. 2024). Both are added before the ranks' all-reduce.
    """

    def __init__(self, placement: Placement, config: ModelConfig) -> None:
        super().__init__(placement, config)
        assert config.moe is not None, "only families with experts have sparse layers"
        self.shared_expert = GatedMLP(
            placement,
            config,
            config.moe.shared_intermediate_size,
            "shared_expert_intermediate_size",
        )
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
    """The common layer with a shared expert beside the routed ones."""

    sparse_mlp = SharedExpertMLP


class Qwen2MoeModel(DecoderModel):
    """Qwen1.5-MoE and Qwen2-MoE."""

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


class Qwen3Model(DecoderModel):
    """Qwen3: the common layer, with QK-norm."""

    family = Family(
        num_kv_heads=32,
        head_dim=128,
        bias_setting="attention_bias",
        biased_o_proj=True,
        window=window_if_asked(lambda layer, limit: layer >= limit),
        free_layer_types=True,
        qk_norm=True,
    )


class Qwen3MoeModel(DecoderModel):
    """Qwen3-MoE: experts in place of most layers' MLPs."""

    family = Family(
        num_kv_heads=4,
        bias_setting="attention_bias",
        biased_o_proj=True,
        window=window_if_asked(lambda _layer, _limit: True),
        qk_norm=True,
        sparse=True,
    )
    layer_class = SparseDecoderLayer
