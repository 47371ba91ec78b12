"""LFM2 and LFM2.5 (Liquid AI, 2025): gated short convolutions, a few layers of attention, and MLPs
or, in later layers of LFM2-MoE, experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Final

import torch
from msgspec.structs import replace
from torch import Tensor

from nanocore.kernels.states import MAX_TAPS, ConvFilters, StateCache
from nanocore.worker.config.config_json import MAX_LAYERS, ConfigReader
from nanocore.worker.config.json_settings import Range, Settings
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.config.rope_config import read_rope
from nanocore.worker.layers.decoder import DecoderLayer, DecoderModel
from nanocore.worker.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    RowShard,
    StepContext,
    row_entry,
)
from nanocore.worker.layers.packing import WeightPacker
from nanocore.worker.loading.weights import Entries
from nanocore.worker.memory.kv_memory import StateSpec
from nanocore.worker.placement import Placement

_CONV: Final = "conv"
_NAMES: Final = {
    "model.embedding_norm.": "model.norm.", ".self_attn.out_proj.": ".self_attn.o_proj.",
    ".self_attn.q_layernorm.": ".self_attn.q_norm.", ".self_attn.k_layernorm.":
    ".self_attn.k_norm.", ".feed_forward.": ".mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.",
    ".w3.": ".up_proj.", ".expert_bias": ".gate.e_score_correction_bias",
}  # fmt: skip
"""Parts of tensors' names, and what other families call them."""


class Lfm2Config(ModelConfig, frozen=True, kw_only=True):
    """conv_layers: indices of layers with a convolution. num_taps: its length."""

    conv_layers: frozenset[int]
    num_taps: int
    conv_bias: bool


class ShortConv:
    """One layer's gated convolution, out(c * conv(b * u)), split over ranks by channels."""

    name: ClassVar[str] = _CONV
    pair_flops = 0

    def __init__(self, placement: Placement, config: Lfm2Config) -> None:
        size, what = config.hidden_size, "the hidden size (hidden_size)"
        self.rows = RowShard.share(placement, size, what)
        bias = config.conv_bias
        self.in_proj = ColumnParallelLinear(placement, size, [self.rows] * 3, bias=bias)
        self.out_proj = RowParallelLinear(placement, size, size, what, bias=bias)
        self.taps_LC = placement.empty(config.num_taps, self.rows.size, dtype=torch.float32)
        self.bias_C = placement.empty(self.rows.size, dtype=torch.float32) if bias else None
        channels = self.rows.size
        self.cache_spec = StateSpec((config.num_taps - 1, channels), placement.dtype, 3 * channels)

    def entries(self, prefix: str) -> Entries:
        entries = {
            **self.in_proj.fused_entries(f"{prefix}in_proj"),
            **self.out_proj.entries(f"{prefix}out_proj"),
            f"{prefix}conv.weight": row_entry(self.taps_LC.t().unsqueeze(1), [self.rows]),
        }
        if self.bias_C is not None:
            entries[f"{prefix}conv.bias"] = row_entry(self.bias_C, [self.rows])
        return entries

    def pack(self, packer: WeightPacker) -> None:
        self.in_proj.pack(packer)
        self.out_proj.pack(packer)

    def __call__(self, x_TE: Tensor, cache: StateCache, context: StepContext) -> Tensor:
        filters = ConvFilters(self.taps_LC, self.bias_C)
        metadata = context.metadata[cache.group]
        y_TC = context.kernels.short_conv(self.in_proj(x_TE, context), filters, cache, metadata)
        return self.out_proj(y_TC, context)


class Lfm2Layer(DecoderLayer):
    norms: ClassVar[dict[str, str]] = {
        "input_norm": "operator_norm",
        "post_attention_norm": "ffn_norm",
    }

    def make_mixer(self, placement: Placement, config: ModelConfig, layer: int) -> Any:
        assert isinstance(config, Lfm2Config)
        if layer in config.conv_layers:
            return ShortConv(placement, config)
        return super().make_mixer(placement, config, layer)


class Lfm2Model(DecoderModel):
    layer_class = Lfm2Layer

    @classmethod
    def translate(cls, settings: Settings) -> Settings:
        """The final norm, the width and whether the head is tied have names of their own."""
        values = {
            **settings.values,
            "rms_norm_eps": settings.get("norm_eps", float, 1e-5),
            **cls.mlp_settings(settings),
        }
        if settings.has("tie_embedding"):
            values["tie_word_embeddings"] = settings.get("tie_embedding", bool, True)
        return settings.with_values(values)

    @classmethod
    def mlp_settings(cls, settings: Settings) -> dict[str, Any]:
        """Settings of MLPs under their common names."""
        return {"intermediate_size": _inner_size(settings)}

    @classmethod
    def read(cls, reader: ConfigReader) -> ModelConfig:
        settings, every = reader.settings, range(reader.num_layers)
        with_attention = settings.get("full_attn_idxs", list[int], list(every))
        for layer in with_attention:
            settings.within("full_attn_idxs", layer, Range(0, len(every) - 1))
        conv_layers, others = reader.mixed_layers(_CONV, lambda i: i not in with_attention)
        num_taps = settings.size("conv_L_cache", 3)
        settings.within("conv_L_cache", num_taps, Range(2, MAX_TAPS))
        attention = others.attention(
            num_kv_heads=8, qk_norm=True, rope=partial(read_rope, theta=1_000_000.0)
        )
        return reader.model(
            attention,
            reader.mlp(),
            Lfm2Config,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            eos_token_id=2,
            conv_layers=conv_layers,
            num_taps=num_taps,
            conv_bias=reader.flag("conv_bias"),
        )

    @classmethod
    def common_name(cls, stored: str) -> str | None:
        name = super().common_name(stored)
        for own, common in _NAMES.items():
            name = name and name.replace(own, common)
        return name


class Lfm2MoeModel(Lfm2Model):
    """LFM2-MoE: a router as DeepSeek-V3's, without groups of experts."""

    @classmethod
    def mlp_settings(cls, settings: Settings) -> dict[str, Any]:
        num_dense = settings.get("num_dense_layers", int, 2)
        settings.within("num_dense_layers", num_dense, Range(0, MAX_LAYERS))
        return {
            "mlp_only_layers": list(range(num_dense)),
            "norm_topk_prob": settings.get("norm_topk_prob", bool, True),
        }

    @classmethod
    def read(cls, reader: ConfigReader) -> ModelConfig:
        limits, has_bias = Range(0, 1e3, exceeds_low=True), reader.flag("use_expert_bias", True)
        factor = reader.settings.number("routed_scaling_factor", 1.0, limits)
        moe = reader.moe(score="sigmoid", has_bias=has_bias, epsilon=1e-6, factor=factor)
        return replace(super().read(reader), moe=moe)


def _inner_size(settings: Settings) -> int:
    """The MLP's width, which most files give before an adjustment."""
    size = settings.size("block_ff_dim", settings.size("intermediate_size", 12288))
    if not settings.get("block_auto_adjust_ff_dim", bool, True):
        return size
    size = int(2 * size / 3)
    factor = settings.nullable_number("block_ffn_dim_multiplier", 1.0, Range(1e-3, 1e3))
    if factor is None:
        return size
    multiple = settings.size("block_multiple_of", 256)
    return -(-int(factor * size) // multiple) * multiple
