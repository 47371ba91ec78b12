"""Mixture of experts in plain torch: tokens sorted by expert, one grouped GEMM for each projection.

(Grouped GEMM for experts: MegaBlocks, Gale et al. 2022.) Only experts that have tokens are read, so
a small batch does not pay for all of them. A token's outputs are put back in the order of its
choices and summed in that order, so no sum is in the order in which experts happened to finish.
Shape suffixes: see `interface`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanocore.kernels.activation import Activation
from nanocore.kernels.experts import StackedExperts
from nanocore.kernels.interface import Routing, SharedExpert


def activate(x: Tensor, activation: Activation) -> Tensor:
    """act(x)."""
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")


def gated(x_TO: Tensor, activation: Activation) -> Tensor:
    """act(first half) * second half, [T, O / 2]."""
    gate, up = x_TO.chunk(2, dim=-1)
    return activate(gate, activation) * up


def route(routing: Routing) -> tuple[Tensor, Tensor]:
    """(expert ids, int64 [T, C]; their weights, float32 [T, C])."""
    probs_TX = routing.logits_TX.softmax(-1, dtype=torch.float32)
    weights_TC, expert_ids_TC = probs_TX.topk(routing.num_chosen)
    if routing.is_normalized:
        weights_TC = weights_TC / weights_TC.sum(-1, keepdim=True)
    return expert_ids_TC, weights_TC


def add_shared(out_TE: Tensor, shared: SharedExpert | None) -> Tensor:
    """What the chosen experts say, and the shared one."""
    return out_TE if shared is None else out_TE + shared.gate_T1.sigmoid() * shared.out_TE


def moe(
    x_TE: Tensor,
    experts: StackedExperts,
    expert_ids_TC: Tensor,
    weights_TC: Tensor,
    activation: Activation = "silu",
) -> Tensor:
    """The weighted sum of each token's C experts, [T, E]; see `interface.Kernels.moe`.

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
    """Where each expert's tokens end in the sorted order, int32 [X]."""
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
