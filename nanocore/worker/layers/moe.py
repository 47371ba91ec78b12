"""A mixture of experts: of many gated MLPs, a router chooses a few for each token.

(Shazeer et al. 2017; without capacity limits, so a token's result never depends on the others of
its step.) Tensor parallel ranks hold a share of every expert, not whole experts: they have equal
work however tokens are routed, and one all-reduce adds up their results. The router is on every
rank, and since ranks agree on hidden states to the bit, they agree on the experts.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from nanocore.kernels.interface import Routing, SharedExpert
from nanocore.worker.config.model_config import ModelConfig
from nanocore.worker.layers.context import StepContext
from nanocore.worker.layers.decoder import MLP, DecoderLayer
from nanocore.worker.layers.linear import Rows
from nanocore.worker.layers.packing import Weight, WeightPacker
from nanocore.worker.loading.weights import Entries, Entry, Part, whole
from nanocore.worker.placement import Placement


class SparseMLP:
    """One layer's experts and its router.

    Raises:
        ConfigError: moe_intermediate_size cannot be shared evenly.
    """

    def __init__(self, placement: Placement, config: ModelConfig) -> None:
        moe, hidden_size = config.moe, config.hidden_size
        assert moe is not None, "only families with experts have sparse layers"
        self.tp = placement.tp
        self.num_experts_per_tok = moe.num_experts_per_tok
        self.norm_topk_prob = moe.norm_topk_prob
        self.activation = config.hidden_act
        self.rows = Rows.share(placement, moe.intermediate_size, "moe_intermediate_size")
        self.router = Weight(placement.empty(moe.num_experts, hidden_size))
        self.gate_up_XIE = placement.empty(moe.num_experts, 2 * self.rows.size, hidden_size)
        self.down_XEI = placement.empty(moe.num_experts, hidden_size, self.rows.size)

    def entries(self, prefix: str) -> Entries:
        """Checkpoints keep every expert's projections apart."""
        entries = {f"{prefix}gate.weight": whole(self.router.parameter)}
        hidden_size = self.down_XEI.shape[1]
        inner = self.rows.kept
        in_shape, out_shape = (self.rows.total, hidden_size), (hidden_size, self.rows.total)
        gates_XIE, ups_XIE = self.gate_up_XIE.chunk(2, dim=1)
        experts = zip(gates_XIE.unbind(), ups_XIE.unbind(), self.down_XEI.unbind(), strict=True)
        for i, (gate_IE, up_IE, down_EI) in enumerate(experts):
            expert = f"{prefix}experts.{i}."
            entries[f"{expert}gate_proj.weight"] = Entry(in_shape, [Part(gate_IE, (inner,))])
            entries[f"{expert}up_proj.weight"] = Entry(in_shape, [Part(up_IE, (inner,))])
            down = Part(down_EI, (slice(0, hidden_size), inner))
            entries[f"{expert}down_proj.weight"] = Entry(out_shape, [down])
        return entries

    def pack(self, packer: WeightPacker) -> None:
        """See `Weight`; of the router alone, for `Kernels.moe` takes experts as they are loaded."""
        self.router.pack(packer.unquantized)

    def __call__(self, x_TE: Tensor, context: StepContext) -> Tensor:
        return context.kernels.all_reduce(self.partial_sum(x_TE, context), self.tp)

    def partial_sum(self, x_TE: Tensor, context: StepContext) -> Tensor:
        """What this rank adds to the result, [T, E], before the ranks' all-reduce."""
        logits_TX = context.kernels.linear(x_TE, self.router.packed)
        return context.kernels.moe(
            x_TE, self.gate_up_XIE, self.down_XEI,
            Routing(logits_TX, self.num_experts_per_tok, self.norm_topk_prob),
            self.shared(x_TE, context), self.activation,
        )  # fmt: skip

    def shared(self, x_TE: Tensor, context: StepContext) -> SharedExpert | None:
        """What every token passes, in families that have it."""
        return None


class SparseDecoderLayer(DecoderLayer):
    """The common layer with experts where the configuration has them."""

    sparse_mlp: ClassVar[type[SparseMLP]] = SparseMLP

    def make_mlp(self, placement: Placement, config: ModelConfig, layer: int) -> MLP:
        if config.moe and layer in config.moe.sparse_layers:
            return self.sparse_mlp(placement, config)
        return super().make_mlp(placement, config, layer)
