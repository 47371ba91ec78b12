"""What every layer of a step shares, handed down the call: no globals, no state between steps."""

from __future__ import annotations

from dataclasses import dataclass

from nanocore.kernels.interface import AttentionMetadata, Kernels, Rotary


@dataclass(frozen=True, slots=True)
class StepContext:
    """rotary: of all positions, by what `ModelConfig.rotation` says of a layer."""

    kernels: Kernels
    metadata: AttentionMetadata
    rotary: dict[str, Rotary]
