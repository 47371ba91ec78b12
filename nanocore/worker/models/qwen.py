"""Qwen2, Qwen2.5 and Qwen3 (technical reports, 2024 and 2025), dense and with experts.

Later layers may have a window.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace
from torch import Tensor

from nanocore.kernels.linear import SharedExpert
from nanocore.worker.config.config_json import ConfigReader, Windows
from nanocore.worker.config.json_settings import MAX_SIZE, Range
from nanocore.worker.config.model_config import MLPConfig, ModelConfig, MoeConfig
from nanocore.worker.layers.decoder import DecoderLayer, DecoderModel
from nanocore.worker.layers.linear import ColumnParallelLinear, RowShard, StepContext
from nanocore.worker.layers.mlp import GatedMLP
from nanocore.worker.layers.moe import SparseMLP
from nanocore.worker.layers.packing import WeightPacker
from nanocore.worker.loading.weights import Entries
from nanocore.worker.placement import Placement


def _windows(reader: ConfigReader, chosen: Callable[[int, int], bool]) -> Windows:
    """A window that must be switched on. chosen: of layer index and max_window_layers."""
    settings = reader.settings
    if not reader.flag("use_sliding_window"):
        return None, lambda _layer: False
    window = settings.nullable("sliding_window", int, 4096)
    limit = settings.get("max_window_layers", int, 28)
    settings.within("max_window_layers", limit, Range(0, MAX_SIZE))
    return window, lambda layer: window is not None and chosen(layer, limit)


class Qwen2Model(DecoderModel):
    """Qwen2 and Qwen2.5: the common layer, with biases of Q, K and V."""

    @classmethod
    def read(cls, reader: ConfigReader) -> ModelConfig:
        attention = reader.attention(
            num_kv_heads=32,
            bias=True,
            o_proj_bias=False,
            windows=_windows(reader, lambda layer, limit: layer >= limit),
            free_layer_types=True,
        )
        return reader.model(attention, reader.mlp())


class SharedExpertConfig(MoeConfig, frozen=True, kw_only=True):
    """shared_inner_size: of the gated expert that every token passes."""

    shared_inner_size: int


class SharedExpertMLP(SparseMLP):
    """Routed experts, plus sigmoid(gate(x)) times a shared expert that every token passes.

    Shared experts: DeepSeekMoE (Dai et al. 2024). Both are added before the ranks' all-reduce.
    """

    def __init__(
        self, placement: Placement, config: SharedExpertConfig, mlp: MLPConfig, hidden_size: int
    ) -> None:
        super().__init__(placement, config, mlp, hidden_size)
        shared = replace(mlp, inner_size=config.shared_inner_size)
        self.shared_expert = GatedMLP(
            placement, shared, hidden_size, "shared_expert_intermediate_size"
        )
        self.shared_gate = ColumnParallelLinear(placement, hidden_size, [RowShard(1, 0, 1)])

    def entries(self, prefix: str) -> Entries:
        return {
            **super().entries(prefix),
            **self.shared_expert.entries(f"{prefix}shared_expert."),
            **self.shared_gate.entries(f"{prefix}shared_expert_gate"),
        }

    def pack(self, packer: WeightPacker) -> None:
        super().pack(packer)
        self.shared_expert.pack(packer)
        self.shared_gate.weight.pack(packer.unquantized)

    def shared(self, x_TE: Tensor, context: StepContext) -> SharedExpert:
        gate_T1 = self.shared_gate(x_TE, context)
        return SharedExpert(gate_T1, self.shared_expert.partial_sum(x_TE, context))


class Qwen2MoeLayer(DecoderLayer):
    sparse_mlp = SharedExpertMLP


class Qwen2MoeModel(DecoderModel):
    """Qwen1.5-MoE and Qwen2-MoE."""

    layer_class = Qwen2MoeLayer

    @classmethod
    def read(cls, reader: ConfigReader) -> ModelConfig:
        attention = reader.attention(
            num_kv_heads=16,
            bias=reader.flag("qkv_bias", True),
            o_proj_bias=False,
            windows=_windows(reader, lambda layer, limit: layer % 2 == 0 and layer < limit),
            free_layer_types=True,
        )
        shared_size = reader.settings.size("shared_expert_intermediate_size")
        moe = reader.moe(SharedExpertConfig, shared_inner_size=shared_size)
        return reader.model(attention, reader.mlp(), moe=moe)


class Qwen3Model(DecoderModel):
    """Qwen3: the common layer, with QK-norm."""

    @classmethod
    def read(cls, reader: ConfigReader) -> ModelConfig:
        attention = reader.attention(
            num_kv_heads=32,
            head_dim=128,
            bias=reader.flag("attention_bias"),
            qk_norm=True,
            windows=_windows(reader, lambda layer, limit: layer >= limit),
            free_layer_types=True,
        )
        return reader.model(attention, reader.mlp())


class Qwen3MoeModel(DecoderModel):
    """Qwen3-MoE: experts in place of most layers' MLPs."""

    @classmethod
    def read(cls, reader: ConfigReader) -> ModelConfig:
        attention = reader.attention(
            num_kv_heads=4,
            bias=reader.flag("attention_bias"),
            qk_norm=True,
            windows=_windows(reader, lambda _layer, _limit: True),
        )
        return reader.model(attention, reader.mlp(), moe=reader.moe())
