"""The layers that decoder models are built from. Shape suffixes: see `nanocore.kernels.backend`.

Layers hold plain tensors and are called; what changes from step to step (the kernels' metadata and
the KV cache) is passed in. Merged projections keep one weight for what checkpoints store apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nanocore.kernels.backend import AttentionMetadata, Kernels


@dataclass(frozen=True, slots=True)
class StepContext:
    """What every layer of a step shares. cos, sin: [T, D / 2] in the model's dtype."""

    kernels: Kernels
    metadata: AttentionMetadata
    cos_TD: Tensor
    sin_TD: Tensor


@dataclass(frozen=True, slots=True)
class KVCache:
    """One layer's K and V, each [num_blocks, block_size, kv_heads, head_dim]."""

    k_NSKD: Tensor
    v_NSKD: Tensor


class Linear:
    """y = x W^T, where W's rows may be several checkpoint tensors one after the other."""

    def __init__(self, in_features: int, out_features: list[int], dtype: torch.dtype,
                 device: torch.device) -> None:  # fmt: skip
        self.out_features = out_features
        self.weight = torch.empty(sum(out_features), in_features, dtype=dtype, device=device)

    def slots(self, *names: str) -> dict[str, Tensor]:
        """Views of the weight, one per checkpoint tensor, in the order of out_features."""
        parts = self.weight.split(self.out_features)
        return {f"{name}.weight": part for name, part in zip(names, parts, strict=True)}

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class RotaryTable:
    """cos and sin of every position, computed once in float32 (RoPE: Su et al. 2021)."""

    def __init__(self, head_dim: int, theta: float, max_len: int, dtype: torch.dtype,
                 device: torch.device) -> None:  # fmt: skip
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), theta**-exponents)
        self.cos = angles.cos().to(device, dtype)
        self.sin = angles.sin().to(device, dtype)

    def __call__(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[positions_T], self.sin[positions_T]
