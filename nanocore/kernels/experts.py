"""The experts of one layer as a backend keeps them: gated MLPs, of which each token takes a few.

Backends that multiply all experts' rows in one grouped product stack their weights; others keep
them one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from nanocore.kernels.linear_weight import LinearWeight

Experts = object
"""What a backend made of a layer's experts: its own, see `Kernels.pack_experts`."""


@dataclass(slots=True)
class ExpertWeights:
    """X experts' projections, packed as those of linear layers; whoever stacks them empties it."""

    gates: list[LinearWeight]
    ups: list[LinearWeight]
    downs: list[LinearWeight]


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """gate_up_XIE: [X, 2 I, E], gate before up. down_XEI: [X, E, I]."""

    gate_up_XIE: Tensor
    down_XEI: Tensor


def stack(weights: ExpertWeights) -> StackedExperts:
    """Weights of floats, each of which is gone when it is copied."""
    gate, down = weights.gates[0], weights.downs[0]
    num_experts, inner = len(weights.gates), gate.out_features
    gate_up_XIE = gate.data.new_empty(num_experts, 2 * inner, gate.in_features)
    down_XEI = down.data.new_empty(num_experts, down.out_features, down.in_features)
    del gate, down
    for expert, data in enumerate(_taken(weights.gates)):
        gate_up_XIE[expert, :inner] = data
    for expert, data in enumerate(_taken(weights.ups)):
        gate_up_XIE[expert, inner:] = data
    for expert, data in enumerate(_taken(weights.downs)):
        down_XEI[expert] = data
    return StackedExperts(gate_up_XIE, down_XEI)


def _taken(weights: list[LinearWeight]) -> Iterator[Tensor]:
    weights.reverse()
    while weights:
        weight = weights.pop()
        assert weight.scale_O is None, "stacked experts are floats"
        yield weight.data
