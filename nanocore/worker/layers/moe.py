"""A mixture of experts: of many gated MLPs, a router chooses a few for each token.

(Shazeer et al. 2017; without capacity limits, so a token's result never depends on the others of
its step.) Tensor parallel ranks hold a share of every expert, not whole experts: they have equal
work however tokens are routed, and one all-reduce adds up their results. The router is on every
rank, and since ranks agree on hidden states to the bit, they agree on the experts.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from nanocore.kernels.linear import Routing, SharedExpert
from nanocore.kernels.linear_weight import Experts, ExpertWeights, LinearWeight
from nanocore.worker.config.model_config import MLPConfig, MoeConfig
from nanocore.worker.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    RowShard,
    StepContext,
)
from nanocore.worker.layers.packing import WeightPacker, Weights
from nanocore.worker.loading.weights import Entries, whole
from nanocore.worker.placement import Placement


class SparseMLP:
    """One layer's experts and its router. mlp: the dense one in whose place they are.

    Each weight is packed when it is filled, and all are given to the backend when the last one is:
    so no more than one layer's experts are in memory twice.

    Raises ConfigError: moe_intermediate_size cannot be shared evenly.
    """

    def __init__(
        self, placement: Placement, config: MoeConfig, mlp: MLPConfig, hidden_size: int
    ) -> None:
        self.tp = placement.tp
        self.activation = mlp.activation
        num_experts = config.num_experts
        self.bias_X = placement.empty(num_experts, dtype=torch.float32) if config.has_bias else None
        self._routing = partial(
            Routing, num_chosen=config.num_experts_per_tok, is_normalized=config.norm_topk_prob,
            score=config.score, bias_X=self.bias_X, epsilon=config.epsilon, factor=config.factor,
        )  # fmt: skip
        inner_size, what = config.inner_size, "moe_intermediate_size"
        in_rows = [RowShard.share(placement, inner_size, what)]
        make_in = partial(ColumnParallelLinear, placement, hidden_size, in_rows)
        self.router = ColumnParallelLinear(
            placement, hidden_size, [RowShard(num_experts, 0, num_experts)]
        )
        self._projections = [
            (make_in(), make_in(), RowParallelLinear(placement, inner_size, hidden_size, what))
            for _ in range(num_experts)
        ]
        """Gate, up and down of each."""
        self._packed: dict[tuple[int, int], LinearWeight] = {}
        """By expert and projection, until all are."""
        self._experts: Experts | None = None

    def entries(self, prefix: str) -> Entries:
        entries = self.router.entries(f"{prefix}gate")
        if self.bias_X is not None:
            entries[f"{prefix}gate.e_score_correction_bias"] = whole(self.bias_X)
        for expert, (gate, up, down) in enumerate(self._projections):
            name = f"{prefix}experts.{expert}."
            entries |= gate.entries(f"{name}gate_proj") | up.entries(f"{name}up_proj")
            entries |= down.entries(f"{name}down_proj")
        return entries

    def pack(self, packer: WeightPacker) -> None:
        self.router.weight.pack(packer.unquantized)
        for expert, (gate, up, down) in enumerate(self._projections):
            for projection, weight in enumerate((gate.weight, up.weight, down.weight)):
                weight.pack(partial(self._pack_one, packer, (expert, projection)))

    def __call__(self, x_TE: Tensor, context: StepContext) -> Tensor:
        logits_TX = self.router(x_TE, context)
        partial_sum_TE = context.kernels.moe(
            x_TE,
            self.experts,
            self._routing(logits_TX),
            self.shared(x_TE, context),
            self.activation,
        )
        return context.kernels.all_reduce(partial_sum_TE, self.tp)

    @property
    def experts(self) -> Experts:
        assert self._experts is not None, "these experts are not packed yet"
        return self._experts

    def shared(self, x_TE: Tensor, context: StepContext) -> SharedExpert | None:
        """The shared expert's output, in families that have one."""
        return None

    def _pack_one(
        self, packer: WeightPacker, name: tuple[int, int], weights: Weights
    ) -> LinearWeight:
        packed = self._packed[name] = packer.expert(weights)
        if len(self._packed) == 3 * len(self._projections) and packed.data.device.type != "meta":
            experts = range(len(self._projections))
            lists = [[self._packed.pop((i, j)) for i in experts] for j in range(3)]
            self._experts = packer.experts(ExpertWeights(*lists))
        # What is kept is in `_experts` alone.
        nothing = packed.data.new_empty(0)
        return LinearWeight(packed.out_features, packed.in_features, packed.dtype, nothing)
