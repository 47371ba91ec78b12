"""A layer of experts in any stored form, for backends to be compared in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nanocore.kernels.grouped_weight import CheckpointWeight, GroupedWeight
from nanocore.kernels.interface import Kernels
from nanocore.kernels.linear import Routing, SharedExpert
from nanocore.kernels.linear_weight import Experts, ExpertWeights, StackedExperts
from nanocore.kernels.torch.backend import TorchKernels

ROUTERS: list[dict[str, Any]] = [
    {"is_normalized": False},
    {"has_bias": True, "is_normalized": True, "epsilon": 0.1, "factor": 2.5},
    {"score": "sigmoid", "is_normalized": True, "epsilon": 0.1, "factor": 2.5},
    {"score": "sigmoid", "has_bias": True, "is_normalized": False, "factor": 2.5},
    {"score": "sigmoid", "has_bias": True, "is_normalized": True},
]
"""Settings of `draw_routing` that have every pair of two settings' values between them."""

Stored = list[tuple[CheckpointWeight, CheckpointWeight, CheckpointWeight]]
"""Gate, up and down of each expert."""


def draw_routing(
    logits_TX: Tensor, num_chosen: int, *, has_bias: bool = False, **settings: Any
) -> Routing:
    """Routing with a bias that is drawn, if it has one; it outweighs many logits."""
    generator = torch.Generator().manual_seed(1)
    bias_X = torch.randn(logits_TX.shape[1], generator=generator) if has_bias else None
    return Routing(logits_TX, num_chosen, bias_X=bias_X, **settings)


def pack_experts(kernels: Kernels, stored: Stored, quantization: str | None = None) -> Experts:
    return kernels.pack_experts(
        ExpertWeights(
            *(
                [kernels.pack_linear(weights[i], quantization) for weights in stored]
                for i in range(3)
            )
        )
    )


def unstacked(gate_up_XIE: Tensor, down_XEI: Tensor) -> Stored:
    return [
        (*(half.clone() for half in gate_up_IE.chunk(2)), down_EI.clone())
        for gate_up_IE, down_EI in zip(gate_up_XIE, down_XEI, strict=True)
    ]


def grouped(
    out_features: int, in_features: int, bits: int, group_size: int, *, has_zeros: bool, seed: int
) -> GroupedWeight:
    generator = torch.Generator().manual_seed(seed)
    num_groups = -(-in_features // group_size)
    shape = out_features, num_groups
    scale_OG = (0.5 + torch.rand(shape, generator=generator)) / (1 << bits) / 2
    return GroupedWeight(
        torch.randint(0, 1 << bits, (out_features, in_features), generator=generator).byte(),
        bits,
        group_size,
        scale_OG.half(),
        torch.randint(0, 1 << bits, shape, generator=generator).byte() if has_zeros else None,
    )


@dataclass
class MoeCase:
    """Tokens of a layer. router: of `ROUTERS`."""

    tokens: int
    experts: int = 8
    chosen: int = 2
    hidden: int = 64
    inner: int = 32
    dtype: torch.dtype = torch.float32
    is_normalized: bool = True
    has_shared: bool = False
    seed: int = 0
    router: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        draw = self._draw
        self.x = draw(self.tokens, self.hidden)
        self.logits = draw(self.tokens, self.experts) * 2
        self.shared = draw(self.tokens, 1), draw(self.tokens, self.hidden)

    def floats(self) -> Stored:
        scale = 0.3
        return unstacked(
            self._draw(self.experts, 2 * self.inner, self.hidden) * scale,
            self._draw(self.experts, self.hidden, self.inner) * scale,
        )

    def grouped(self, bits: int, group_size: int, *, has_zeros: bool = False) -> Stored:
        shapes = (self.inner, self.hidden), (self.inner, self.hidden), (self.hidden, self.inner)
        return [
            tuple(
                grouped(*shape, bits, group_size, has_zeros=has_zeros, seed=3 * expert + i)
                for i, shape in enumerate(shapes)
            )  # type: ignore[misc]
            for expert in range(self.experts)
        ]

    def run(self, kernels: Kernels, experts: Experts, rows: Any = slice(None)) -> Tensor:
        shared = SharedExpert(*(part[rows] for part in self.shared)) if self.has_shared else None
        return kernels.moe(self.x[rows], experts, self.routing(rows), shared)

    def routing(self, rows: Any = slice(None)) -> Routing:
        settings = {"is_normalized": self.is_normalized} | self.router
        return draw_routing(self.logits[rows], self.chosen, **settings)

    def expected(self, stored: Stored) -> Tensor:
        gates, ups, downs = (
            torch.stack(
                [w.double() if isinstance(w, Tensor) else w.dequantize().double() for w in weights]
            )
            for weights in zip(*stored, strict=True)
        )
        shared = None
        if self.has_shared:
            shared = SharedExpert(*(part.double() for part in self.shared))
        return TorchKernels().moe(
            self.x.double(),
            StackedExperts(torch.cat((gates, ups), 1), downs),
            self.routing(),
            shared,
        )

    def _draw(self, *shape: int) -> Tensor:
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(*shape, generator=generator).to(self.dtype)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    difference = actual.double() - expected.double()
    return float(difference.norm() / expected.double().norm())
