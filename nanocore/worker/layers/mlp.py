"""MLPs: down(act(gate(x)) * up(x)), gate and up in one projection (Shazeer 2020), or no gate."""

from __future__ import annotations

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

    def __init__(
        self,
        placement: Placement,
        config: MLPConfig,
        hidden_size: int,
        what: str = "intermediate_size",
    ) -> None:
        self.activation = config.activation
        rows = RowShard.share(placement, config.inner_size, what)
        self.gate_up_proj = ColumnParallelLinear(
            placement, hidden_size, [rows, rows], bias=config.bias
        )
        self.down_proj = RowParallelLinear(
            placement, config.inner_size, hidden_size, what, bias=config.bias
        )

    def entries(self, prefix: str) -> Entries:
        return {
            **self.gate_up_proj.entries(f"{prefix}gate_proj", f"{prefix}up_proj"),
            **self.down_proj.entries(f"{prefix}down_proj"),
        }

    def pack(self, packer: WeightPacker) -> None:
        self.gate_up_proj.pack(packer)
        self.down_proj.pack(packer)

    def __call__(self, x_TE: Tensor, context: StepContext) -> Tensor:
        return self.down_proj(self.gate_up_proj.gated(x_TE, self.activation, context), context)

    def partial_sum(self, x_TE: Tensor, context: StepContext) -> Tensor:
        """This rank's summand of the result, before biases."""
        inner_TI = self.gate_up_proj.gated(x_TE, self.activation, context)
        return self.down_proj.partial_sum(inner_TI, context)


class PlainMLP:
    """One layer's MLP without a gate, down(act(up(x))), split over ranks."""

    def __init__(self, placement: Placement, config: MLPConfig, hidden_size: int) -> None:
        inner_size, what = config.inner_size, "intermediate_size"
        self.activation = config.activation
        rows = RowShard.share(placement, inner_size, what)
        self.up_proj = ColumnParallelLinear(placement, hidden_size, [rows], bias=config.bias)
        self.down_proj = RowParallelLinear(
            placement, inner_size, hidden_size, what, bias=config.bias
        )

    def entries(self, prefix: str) -> Entries:
        up_proj, down_proj = f"{prefix}up_proj", f"{prefix}down_proj"
        return self.up_proj.entries(up_proj) | self.down_proj.entries(down_proj)

    def pack(self, packer: WeightPacker) -> None:
        self.up_proj.pack(packer)
        self.down_proj.pack(packer)

    def __call__(self, x_TE: Tensor, context: StepContext) -> Tensor:
        inner_TI = context.kernels.activate(self.up_proj(x_TE, context), self.activation)
        return self.down_proj(inner_TI, context)
