"""What every layer of a step shares, handed down the call: no globals, no state between steps."""

from __future__ import annotations

from dataclasses import dataclass

from nanocore.kernels.interface import AttentionMetadata, Kernels, Rotary


@dataclass(frozen=True, slots=True)
class StepContext:
    """rotary: of all positions, by layer type."""

    kernels: Kernels
    metadata: AttentionMetadata
    rotary: dict[str, Rotary]
