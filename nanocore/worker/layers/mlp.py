"""MLPs: down(act(gate(x)) * up(x)), gate and up in one projection (Shazeer 2020), or no gate."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from nanocore.worker.config.model_config import MLPConfig
from nanocore.worker.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    RowShard,
    StepContext,
)
from nanocore.worker.layers.packing import WeightPacker
from nanocore.worker.loading.weights import Entries
from nanocore.worker.placement import Placement


class GatedMLP:
    """One layer's MLP, split over ranks. what: the inner size's name in config.json."""

    inputs: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")
    """Projections of the input, stacked in `in_proj`."""

    def __init__(
        self,
        placement: Placement,
        config: MLPConfig,
        hidden_size: int,
        what: str = "intermediate_size",
    ) -> None:
        self.activation, bias = config.activation, config.bias
        rows = [RowShard.share(placement, config.inner_size, what)] * len(self.inputs)
        self.in_proj = ColumnParallelLinear(placement, hidden_size, rows, bias=bias)
        self.down_proj = RowParallelLinear(
            placement, config.inner_size, hidden_size, what, bias=bias
        )

    def entries(self, prefix: str) -> Entries:
        return {
            **self.in_proj.entries(*(prefix + name for name in self.inputs)),
            **self.down_proj.entries(f"{prefix}down_proj"),
        }

    def pack(self, packer: WeightPacker) -> None:
        self.in_proj.pack(packer)
        self.down_proj.pack(packer)

    def inner(self, x_TE: Tensor, context: StepContext) -> Tensor:
        """Input of `down_proj`, [T, I / tp]."""
        weight, bias = self.in_proj.weight.packed, self.in_proj.bias
        return context.kernels.gated_linear(x_TE, weight, bias, self.activation)

    def __call__(self, x_TE: Tensor, context: StepContext) -> Tensor:
        return self.down_proj(self.inner(x_TE, context), context)

    def partial_sum(self, x_TE: Tensor, context: StepContext) -> Tensor:
        """This rank's summand of the result, before biases."""
        return context.kernels.linear(self.inner(x_TE, context), self.down_proj.weight.packed)


class PlainMLP(GatedMLP):
    """An MLP without a gate, down(act(up(x)))."""

    inputs = ("up_proj",)

    def inner(self, x_TE: Tensor, context: StepContext) -> Tensor:
        return context.kernels.activate(self.in_proj(x_TE, context), self.activation)
