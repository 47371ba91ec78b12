"""Qwen3-Next (2025) and Qwen3.5 (2026), dense and with experts: Gated DeltaNet (Yang et al. 2024),
and gated attention in every fourth layer.

The norms' weights are stored less one, but for those of DeltaNet's heads. Models that also see
images keep their text part under a name of its own; it is what is served.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from nanocore.kernels.states import MAX_TAPS, ConvFilters, DeltaRule, StateCache
from nanocore.worker.config.config_json import ConfigReader
from nanocore.worker.config.json_settings import Range, Settings
from nanocore.worker.config.model_config import (
    AttentionConfig,
    ModelConfig,
    MoeConfig,
    OffsetNormConfig,
)
from nanocore.worker.layers.attention import Attention
from nanocore.worker.layers.decoder import DecoderLayer
from nanocore.worker.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    RowShard,
    StepContext,
    row_entry,
    stacked,
)
from nanocore.worker.layers.norm import Norm, OffsetNorm
from nanocore.worker.layers.packing import WeightPacker
from nanocore.worker.loading.weights import Entries, whole
from nanocore.worker.memory.kv_memory import StateSpec
from nanocore.worker.models.qwen import SharedExpertConfig, SharedExpertMLP
from nanocore.worker.models.text_part import TextModelPart, read_text_config
from nanocore.worker.placement import Placement

_LINEAR: Final = "linear_attention"
_UNREAD: Final = ("mtp.", "model.visual.")
"""Tensors of the heads that guess further tokens, and of the part that sees images."""
_NUM_KEY_HEADS: Final = "the number of key heads (linear_num_key_heads)"


class HybridConfig(OffsetNormConfig, frozen=True, kw_only=True):
    """linear_layers: indices of layers of DeltaNet; the rest is of their heads, and num_taps of
    their convolution. is_gguf: llama.cpp's converter has made norms whole, made decays of A_log,
    and reordered value heads: those of all key heads in turn.
    """

    linear_layers: frozenset[int]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_taps: int

    @property
    def is_gguf(self) -> bool:
        return self.norms_are_whole

    @property
    def delta_dims(self) -> tuple[int, int]:
        return self.key_dim, self.value_dim


class GatedDeltaNet:
    """One layer's recurrence, split over ranks by key heads, each with its value heads."""

    name: ClassVar[str] = "linear_attn"
    tiled_in_gguf: ClassVar[bool] = True
    pair_flops = 0

    def __init__(self, placement: Placement, config: HybridConfig) -> None:
        self.config = config
        self.is_tiled = config.is_gguf and self.tiled_in_gguf
        self.num_key_heads = placement.share(config.num_key_heads, _NUM_KEY_HEADS)
        num_heads, dim = config.num_value_heads, config.value_dim
        # Of heads that are tiled, ranks have a share of each tile; one rank has all in any case.
        is_cut = self.is_tiled and placement.tp.size > 1
        num_tiles = num_heads // config.num_key_heads if is_cut else 1
        share = partial(RowShard.share, placement, what=_NUM_KEY_HEADS)
        keys = share(config.num_key_heads * config.key_dim)
        values = [share(num_heads // num_tiles * dim)] * num_tiles
        self.channels = stacked([keys, keys, *values])
        self.heads = stacked([share(num_heads // num_tiles)] * num_tiles)
        self.num_channels = sum(rows.size for rows in self.channels)
        make = partial(ColumnParallelLinear, placement, config.hidden_size)
        self.in_proj = make([*self.channels, *stacked(values)])
        self.gates = make(self.heads * 2)
        self.out_proj = RowParallelLinear(
            placement, num_heads * dim, config.hidden_size, "value heads", num_tiles=num_tiles
        )
        num_kept = num_heads // placement.tp.size
        self.taps_LC = placement.empty(config.num_taps, self.num_channels, dtype=torch.float32)
        self.decay_P = placement.empty(num_kept, dtype=torch.float32)
        self.time_bias_P = placement.empty(num_kept, dtype=torch.float32)
        self.norm = placement.empty(dim)
        self.cache_spec = StateSpec(
            (config.num_taps - 1, self.num_channels),
            placement.dtype,
            2 * (self.num_channels + num_kept),
            (num_kept, config.key_dim, dim),
        )

    def entries(self, prefix: str) -> Entries:
        return {
            **self.in_entries(prefix),
            **self.gate_entries(prefix),
            **self.out_proj.entries(f"{prefix}out_proj"),
            f"{prefix}conv1d.weight": row_entry(self.taps_LC.t().unsqueeze(1), self.channels),
            f"{prefix}A_log": row_entry(self.decay_P, self.heads),
            f"{prefix}dt_bias": row_entry(self.time_bias_P, self.heads),
            f"{prefix}norm.weight": whole(self.norm),
        }

    def in_entries(self, prefix: str) -> Entries:
        names = ["qkv"] * len(self.channels) + ["z"] * len(self.heads)
        return self.in_proj.entries(*(f"{prefix}in_proj_{name}" for name in names))

    def gate_entries(self, prefix: str) -> Entries:
        return self.gates.entries(*(f"{prefix}in_proj_{name}" for name in "ba" for _ in self.heads))

    def pack(self, packer: WeightPacker) -> None:
        self.in_proj.pack(packer)
        self.gates.weight.pack(packer.unquantized)
        self.out_proj.pack(packer)

    def finish(self) -> None:
        """Make of A_log what each step's decay is a product with, if it is not that already."""
        (self.decay_P.abs_() if self.config.is_gguf else self.decay_P.exp_()).neg_()

    def __call__(self, x_TE: Tensor, cache: StateCache, context: StepContext) -> Tensor:
        kernels, metadata, config = context.kernels, context.metadata[cache.group], self.config
        projected = self.in_proj(x_TE, context)
        qkv, z = projected[:, : self.num_channels], projected[:, self.num_channels :]
        qkv = kernels.silu_conv(qkv, ConvFilters(self.taps_LC), cache, metadata)
        sizes = self.num_key_heads, config.key_dim, config.value_dim
        rule = DeltaRule(*sizes, self.decay_P, self.time_bias_P, self.is_tiled)
        out = kernels.delta_rule(qkv, self.gates(x_TE, context), rule, cache, metadata)
        return self.out_proj(kernels.gated_norm(out, z, self.norm, config.norm_eps), context)


class PackedDeltaNet(GatedDeltaNet):
    """Qwen3-Next's, whose projections are stored key head by key head: q, k, v and z; b and a.

    GGUF files have only the latter so, and value heads in this order.
    """

    tiled_in_gguf = False

    def in_entries(self, prefix: str) -> Entries:
        if self.config.is_gguf:
            return super().in_entries(prefix)
        keys, values = self.config.key_dim, self.config.value_dim * self.num_values
        qkvz = self._parts([keys, keys, values, values])
        return self.in_proj.slices([f"{prefix}in_proj_qkvz"] * len(qkvz), qkvz)

    def gate_entries(self, prefix: str) -> Entries:
        ba = self._parts([self.num_values] * 2)
        return self.gates.slices([f"{prefix}in_proj_ba"] * len(ba), ba)

    @property
    def num_values(self) -> int:
        return len(self.decay_P) // self.num_key_heads

    def _parts(self, sizes: list[int]) -> list[RowShard]:
        """Rows of each part of these sizes, of one key head after the other."""
        total, first = sum(sizes), self.heads[0].start // self.num_values
        return [
            RowShard(self.config.num_key_heads * total, head * total + sum(sizes[:part]), size)
            for part, size in enumerate(sizes)
            for head in range(first, first + self.num_key_heads)
        ]


class GatedAttention(Attention):
    """Attention whose results are gated by a sigmoid. Q and the gate are stored head by head."""

    def __init__(
        self,
        placement: Placement,
        config: AttentionConfig,
        hidden_size: int,
        layer: int,
        make_norm: Callable[[int], Norm],
    ) -> None:
        super().__init__(placement, config, hidden_size, layer, make_norm)
        self.q_rows = self.qkv_proj.parts[0]
        self.gate_proj = ColumnParallelLinear(
            placement, hidden_size, [self.q_rows], bias=config.bias
        )

    def entries(self, prefix: str) -> Entries:
        _, k_rows, v_rows = self.qkv_proj.parts
        q_proj, k_proj, v_proj = (f"{prefix}{name}_proj" for name in "qkv")
        queries, gates = self._halves(0), self._halves(1)
        names = [q_proj] * len(queries)
        entries = self.qkv_proj.slices([*names, k_proj, v_proj], [*queries, k_rows, v_rows])
        for name, entry in self.gate_proj.slices(names, gates).items():
            entries[name].parts.extend(entry.parts)
        entries |= self.o_proj.entries(f"{prefix}o_proj")
        assert self.q_norm is not None
        assert self.k_norm is not None
        return (
            entries
            | self.q_norm.entries(f"{prefix}q_norm")
            | self.k_norm.entries(f"{prefix}k_norm")
        )

    def _halves(self, half: int) -> list[RowShard]:
        rows, dim = self.q_rows, self.head_dim
        starts = range(2 * rows.start, 2 * (rows.start + rows.size), 2 * dim)
        return [RowShard(2 * rows.total, start + half * dim, dim) for start in starts]

    def pack(self, packer: WeightPacker) -> None:
        super().pack(packer)
        self.gate_proj.pack(packer)

    def output(self, out_TI: Tensor, x_TE: Tensor, context: StepContext) -> Tensor:
        gate_TI = self.gate_proj(x_TE, context)
        return super().output(context.kernels.sigmoid_gate(out_TI, gate_TI), x_TE, context)


class HybridLayer(DecoderLayer):
    attention_class = GatedAttention
    delta_class: ClassVar[type[GatedDeltaNet]] = GatedDeltaNet
    norm_class: ClassVar[type[Norm]] = OffsetNorm
    sparse_mlp = SharedExpertMLP

    def make_mixer(self, placement: Placement, config: ModelConfig, layer: int) -> Any:
        assert isinstance(config, HybridConfig)
        if layer in config.linear_layers:
            return self.delta_class(placement, config)
        return super().make_mixer(placement, config, layer)


class Qwen35Model(TextModelPart):
    """Qwen3.5: with experts in every layer if there are any."""

    layer_class: ClassVar[type[DecoderLayer]] = HybridLayer
    num_kv_heads: ClassVar[int] = 4
    text_kind: ClassVar[str] = "qwen3_5_text"

    def finish(self) -> None:
        for layer in self.layers:
            if isinstance(layer.mixer, GatedDeltaNet):
                layer.mixer.finish()

    @classmethod
    def translate(cls, settings: Settings) -> Settings:
        if settings.has("text_config"):
            _, settings = read_text_config(settings, {cls.text_kind: {}})
        return _without_image_positions(settings)

    @classmethod
    def read(cls, reader: ConfigReader) -> ModelConfig:
        return _read(reader, cls.num_kv_heads)

    @classmethod
    def common_name(cls, stored: str) -> str | None:
        name = super().common_name(stored)
        return None if name is None or name.startswith(_UNREAD) else name


class Qwen35MoeModel(Qwen35Model):
    """Qwen3.5 with experts in place of every MLP; their weights sum to one."""

    num_kv_heads = 2
    text_kind = "qwen3_5_moe_text"

    @classmethod
    def translate(cls, settings: Settings) -> Settings:
        settings = super().translate(settings)
        always = {
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "intermediate_size": settings.size("moe_intermediate_size"),
        }
        return settings.with_values(settings.values | always)

    @classmethod
    def read(cls, reader: ConfigReader) -> ModelConfig:
        size = reader.settings.size("shared_expert_intermediate_size")
        moe = reader.moe(SharedExpertConfig, shared_inner_size=size)
        return _read(reader, cls.num_kv_heads, moe=moe)


class PackedLayer(HybridLayer):
    delta_class = PackedDeltaNet


class Qwen3NextModel(Qwen35MoeModel):
    """Qwen3-Next; some layers may have an MLP."""

    layer_class = PackedLayer

    @classmethod
    def translate(cls, settings: Settings) -> Settings:
        values = {
            "norm_topk_prob": True,
            "intermediate_size": settings.size("moe_intermediate_size"),
            **settings.values,
        }
        return _without_image_positions(settings.with_values(values))


def _read(reader: ConfigReader, num_kv_heads: int, moe: MoeConfig | None = None) -> ModelConfig:
    settings = reader.settings
    interval = settings.size("full_attention_interval", 4)
    linear_layers, others = reader.mixed_layers(_LINEAR, lambda i: (i + 1) % interval != 0)
    attention = others.attention(
        num_kv_heads=num_kv_heads,
        head_dim=256,
        bias=reader.flag("attention_bias"),
        qk_norm=True,
        partial_rope=True,
    )
    num_key_heads = settings.size("linear_num_key_heads", 16)
    num_value_heads = settings.size("linear_num_value_heads", 32)
    if num_value_heads % num_key_heads:
        raise settings.error(
            "linear_num_value_heads", f"is no multiple of linear_num_key_heads, {num_key_heads}"
        )
    mlp = reader.mlp()
    if mlp.activation != "silu":  # convolutions have it, too, and gates of their results do not
        raise settings.error("hidden_act", "is not implemented for this architecture; known: silu")
    if not reader.flag("attn_output_gate", True):
        raise settings.error("attn_output_gate", "is not implemented: attention has a gate")
    num_mtp_layers = settings.get("mtp_num_hidden_layers", int, 0)
    num_taps = settings.size("linear_conv_kernel_dim", 4)
    settings.within("linear_conv_kernel_dim", num_taps, Range(2, MAX_TAPS))
    return reader.model(
        attention,
        mlp,
        HybridConfig,
        moe=moe,
        linear_layers=linear_layers,
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=settings.size("linear_key_head_dim", 128),
        value_dim=settings.size("linear_value_head_dim", 128),
        num_taps=num_taps,
        num_mtp_layers=settings.within("mtp_num_hidden_layers", num_mtp_layers, Range(0, 64)),
        norms_are_whole=reader.is_gguf,
    )


def _without_image_positions(settings: Settings) -> Settings:
    """Settings without those of positions in images: in text all axes' positions are equal."""
    values = {"partial_rotary_factor": 0.25, **settings.values}
    if isinstance(rope := values.get("rope_parameters"), dict):
        own = {"mrope_section", "mrope_interleaved"}
        values["rope_parameters"] = {name: rope[name] for name in rope if name not in own}
    return settings.with_values(values)
