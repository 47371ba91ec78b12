"""What every layer of a step shares, handed down the call: no globals, no state between steps."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nanocore.kernels.backend import AttentionMetadata, Kernels


@dataclass(frozen=True, slots=True)
class StepContext:
    """rotary: cos and sin, each [T, rotary_dim / 2] in the model's dtype, by layer type."""

    kernels: Kernels
    metadata: AttentionMetadata
    rotary: dict[str, tuple[Tensor, Tensor]]
