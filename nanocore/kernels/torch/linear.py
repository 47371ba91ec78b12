"""Products, embeddings and experts in plain torch. Shape suffixes: see `interface`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanocore.kernels import Activation
from nanocore.kernels.grouped_weight import QuantizedForm
from nanocore.kernels.linear import Routing, SharedExpert
from nanocore.kernels.linear_weight import (
    FP8,
    Experts,
    LinearWeight,
    StackedExperts,
    TokenEmbedding,
    pack_rows,
    quantize_rows,
    stack,
    widen,
)


def activate(x_TI: Tensor, activation: Activation) -> Tensor:
    return F.silu(x_TI) if activation == "silu" else F.gelu(x_TI, approximate="tanh")


def gated(x_TO: Tensor, activation: Activation) -> Tensor:
    """act(first half) * second half, [T, O / 2]."""
    gate, up = x_TO.chunk(2, dim=-1)
    return activate(gate, activation) * up


def embedding(token_ids_T: Tensor, embedding: TokenEmbedding) -> Tensor:
    weight, factor = embedding.weight, embedding.factor
    local_T = token_ids_T - embedding.first_token
    is_elsewhere_T = (local_T < 0) | (local_T >= weight.out_features)
    local_T = local_T.masked_fill(is_elsewhere_T, 0)
    x_TE = F.embedding(local_T, weight.data)
    if weight.scale_O is not None:
        x_TE = widen(x_TE, weight.scale_O[local_T])
    x_TE = x_TE.to(embedding.dtype)
    return (x_TE if factor == 1.0 else x_TE * factor).masked_fill_(is_elsewhere_T[:, None], 0)


def moe(
    x_TE: Tensor,
    experts: Experts,
    routing: Routing,
    shared: SharedExpert | None = None,
    activation: Activation = "silu",
) -> Tensor:
    assert isinstance(experts, StackedExperts)
    return add_shared(weighted_experts(x_TE, experts, *route(routing), activation), shared)


def route(routing: Routing) -> tuple[Tensor, Tensor]:
    """(expert ids, int64 [T, C]; their weights, float32 [T, C])."""
    if routing.score == "sigmoid":
        scores_TX = routing.logits_TX.float().sigmoid()
    else:
        scores_TX = routing.logits_TX.softmax(-1, dtype=torch.float32)
    keys_TX = scores_TX if routing.bias_X is None else scores_TX + routing.bias_X
    expert_ids_TC = keys_TX.topk(routing.num_chosen).indices
    weights_TC = scores_TX.gather(1, expert_ids_TC)
    if routing.is_normalized:
        weights_TC = weights_TC / (weights_TC.sum(-1, keepdim=True) + routing.epsilon)
    return expert_ids_TC, weights_TC * routing.factor


def add_shared(out_TE: Tensor, shared: SharedExpert | None) -> Tensor:
    """Add the shared expert's output to the chosen experts'."""
    return out_TE if shared is None else out_TE + shared.gate_T1.sigmoid() * shared.out_TE


def weighted_experts(
    x_TE: Tensor,
    experts: StackedExperts,
    expert_ids_TC: Tensor,
    weights_TC: Tensor,
    activation: Activation = "silu",
) -> Tensor:
    """The weighted sum of each token's C experts, [T, E]; see `LinearKernels.moe`.

    expert_ids_TC: int64, below X. weights_TC: rounded to x's dtype.
    """
    num_chosen = expert_ids_TC.shape[1]
    order = expert_ids_TC.flatten().argsort(stable=True)
    ends_X = _ends(expert_ids_TC, len(experts.down_XEI))
    gate_up = _grouped_linear(x_TE[order // num_chosen], experts.gate_up_XIE, ends_X)
    sorted_out = _grouped_linear(gated(gate_up, activation), experts.down_XEI, ends_X)
    out = torch.empty_like(sorted_out)
    out[order] = sorted_out
    weights_T1C = weights_TC.to(x_TE.dtype)[:, None]
    return (weights_T1C @ out.unflatten(0, (-1, num_chosen)))[:, 0]


def _ends(expert_ids_TC: Tensor, num_experts: int) -> Tensor:
    """End of each expert's tokens in the sorted order, int32 [X]."""
    # Not bincount, which waits for the device.
    counts_X = torch.zeros(num_experts, dtype=torch.int32, device=expert_ids_TC.device)
    ids = expert_ids_TC.flatten()
    counts_X.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
    return counts_X.cumsum(0, dtype=torch.int32)


def _grouped_linear(x_PI: Tensor, weight_XOI: Tensor, ends_X: Tensor) -> Tensor:
    """P rows sorted by expert, each times its expert's weight transposed; [P, O]."""
    if _can_be_grouped(x_PI, weight_XOI):
        return F.grouped_mm(x_PI, weight_XOI.transpose(1, 2), offs=ends_X)
    out = x_PI.new_empty(len(x_PI), weight_XOI.shape[1])
    start = 0
    for expert, end in enumerate(ends_X.tolist()):
        if end > start:
            torch.mm(x_PI[start:end], weight_XOI[expert].T, out=out[start:end])
        start = end
    return out


def _can_be_grouped(x_PI: Tensor, weight_XOI: Tensor) -> bool:
    """Whether torch's grouped GEMM takes these: it wants rows of whole 16 bytes.

    On CUDA it is one kernel for bfloat16 from compute capability 9.0 on, and otherwise,
    like on the CPU, the loop of `_grouped_linear` in C++.
    """
    row_bytes = x_PI.shape[1] * x_PI.element_size()
    return row_bytes % 16 == 0 and weight_XOI.dtype != torch.float64


class TorchLinear:
    """Implements `LinearKernels`. Products are `linear`'s throughout, also if it is overridden."""

    kept_forms: frozenset[QuantizedForm] = frozenset()
    stacks_experts = True
    pack_linear = staticmethod(pack_rows)
    activate = staticmethod(activate)
    embedding = staticmethod(embedding)
    pack_experts = staticmethod(stack)
    moe = staticmethod(moe)

    def linear(self, x_TI: Tensor, weight: LinearWeight, bias_O: Tensor | None = None) -> Tensor:
        if weight.segments:
            parts = weight.parts(bias_O)
            return torch.cat([self.linear(x_TI, *part) for part in parts], dim=1)
        if weight.scale_O is None:
            return F.linear(x_TI, weight.data, bias_O)
        if weight.dtype == FP8:
            values_TI, scale_T = quantize_rows(x_TI)
            y_TO = F.linear(values_TI.float(), weight.data.float()) * scale_T[:, None]
            y_TO = y_TO * weight.scale_O
        else:
            y_TO = F.linear(x_TI.float(), widen(weight.data, weight.scale_O))
        return (y_TO if bias_O is None else y_TO + bias_O.float()).to(x_TI.dtype)

    def gated_linear(
        self,
        x_TI: Tensor,
        weight: LinearWeight,
        bias_O: Tensor | None = None,
        activation: Activation = "silu",
    ) -> Tensor:
        return gated(self.linear(x_TI, weight, bias_O), activation)

    def logits(self, x_RE: Tensor, weight: LinearWeight, softcap: float = 0.0) -> Tensor:
        logits_RV = self.linear(x_RE, weight).float()
        return logits_RV.div_(softcap).tanh_().mul_(softcap) if softcap else logits_RV
