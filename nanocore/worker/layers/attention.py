"""Grouped-query attention over the paged KV cache, with what `AttentionConfig` asks for.

Query heads are split over ranks, and KV heads with them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

from torch import Tensor

from nanocore.kernels.attention import AttentionSpec, KVCache, QKNorm
from nanocore.worker.config.model_config import AttentionConfig
from nanocore.worker.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    RowShard,
    StepContext,
)
from nanocore.worker.layers.norm import Norm
from nanocore.worker.layers.packing import WeightPacker
from nanocore.worker.loading.weights import Entries
from nanocore.worker.memory.kv_memory import KVSpec
from nanocore.worker.placement import Placement


class Attention:
    """One layer's attention. make_norm: of the family's norm, by size. num_heads: on this rank."""

    name: ClassVar[str] = "self_attn"

    def __init__(
        self,
        placement: Placement,
        config: AttentionConfig,
        hidden_size: int,
        layer: int,
        make_norm: Callable[[int], Norm],
    ) -> None:
        head_dim = self.head_dim = config.head_dim
        self.num_heads = placement.share(
            config.num_heads, "the number of heads (num_attention_heads)"
        )
        size, what = config.num_heads * head_dim, "the size of all heads"
        q_rows = RowShard.share(placement, size, what)
        kv_rows = RowShard.kv_heads(placement, config.num_kv_heads, head_dim)
        window = config.window(layer)
        self.cache_spec = KVSpec(kv_rows.size // head_dim, head_dim, window)
        self.qkv_proj = ColumnParallelLinear(
            placement, hidden_size, [q_rows, kv_rows, kv_rows], bias=config.bias
        )
        self.o_proj = RowParallelLinear(placement, size, hidden_size, what, bias=config.o_proj_bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm, self.k_norm = make_norm(head_dim), make_norm(head_dim)
        self.rotation = config.rotation(layer)
        self.spec = AttentionSpec(scale=config.scale, window=window, softcap=config.softcap)

    @property
    def pair_flops(self) -> int:
        """Operations for a query-key pair: a product of Q and K, and a weight times V."""
        return 4 * self.num_heads * self.head_dim

    def entries(self, prefix: str) -> Entries:
        entries = self.qkv_proj.entries(f"{prefix}q_proj", f"{prefix}k_proj", f"{prefix}v_proj")
        entries |= self.o_proj.entries(f"{prefix}o_proj")
        if self.q_norm and self.k_norm:
            entries |= self.q_norm.entries(f"{prefix}q_norm")
            entries |= self.k_norm.entries(f"{prefix}k_norm")
        return entries

    def pack(self, packer: WeightPacker) -> None:
        num_kept = sum(self.qkv_proj.sizes[1:])
        self.qkv_proj.weight.pack(partial(packer.attention, num_kept))
        self.o_proj.pack(packer)

    def project(self, x_TE: Tensor, context: StepContext) -> Tensor:
        """Heads of Q, of K and of V, [T, (H + 2 K) D]; the caller may write over them."""
        return self.qkv_proj(x_TE, context)

    def __call__(self, x_TE: Tensor, cache: KVCache, context: StepContext) -> Tensor:
        q_THD = self.store(x_TE, cache, context)
        metadata = context.metadata[cache.group]
        out_THD = context.kernels.paged_attention(q_THD, cache, metadata, self.spec)
        return self.output(out_THD.flatten(1), x_TE, context)

    def store(self, x_TE: Tensor, cache: KVCache, context: StepContext) -> Tensor:
        """Write the tokens' K and V to the cache; returns their rotated Q, [T, H, D]."""
        qk_norm = None
        if self.q_norm and self.k_norm:
            qk_norm = QKNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        return context.kernels.rope_and_store_kv(
            self.project(x_TE, context),
            self.num_heads,
            qk_norm,
            context.rotary[self.rotation],
            cache,
            context.metadata[cache.group],
        )

    def output(self, out_TI: Tensor, x_TE: Tensor, context: StepContext) -> Tensor:
        """What is made of the heads' results, [T, H D]. x_TE: the layer's input."""
        return self.o_proj(out_TI, context)
