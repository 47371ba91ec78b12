"""The reference backend: plain torch on any device, written to be checked by eye.

Every other backend is compared with this one. What takes more than a few lines has
a file of its own, `torch_*`. Shape suffixes: see `backend`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nanocore.kernels.torch_attention import paged_attention
from nanocore.kernels.torch_kv_cache import store_kv
from nanocore.kernels.torch_moe import moe

if TYPE_CHECKING:
    from nanocore.kernels.backend import AttentionMetadata, AttentionSpec, KVCache


class TorchKernels:
    """Implements `backend.Kernels`."""

    name = "torch"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x_float = x.float()
        normed = x_float * torch.rsqrt(x_float.pow(2).mean(-1, keepdim=True) + eps)
        return (normed.to(weight.dtype) * weight).to(x.dtype)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        residual = residual + x
        return self.rms_norm(residual, weight, eps), residual

    def rope(self, x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        cos, sin = cos_TD[:, None], sin_TD[:, None]
        first, second, *rest = x_THD.split(cos_TD.shape[-1], dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, *rest), dim=-1)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gelu_and_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def moe(
        self,
        x_TE: Tensor,
        gate_up_XIE: Tensor,
        down_XEI: Tensor,
        expert_ids_TC: Tensor,
        weights_TC: Tensor,
    ) -> Tensor:
        return moe(x_TE, gate_up_XIE, down_XEI, expert_ids_TC, weights_TC)

    def store_kv(
        self, k_TKD: Tensor, v_TKD: Tensor, cache: KVCache, slot_mapping_T: Tensor
    ) -> None:
        store_kv(k_TKD, v_TKD, cache, slot_mapping_T)

    def paged_attention(
        self, q_THD: Tensor, cache: KVCache, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        return paged_attention(q_THD, cache, metadata, spec)
