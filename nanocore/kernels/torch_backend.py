"""The reference backend: plain torch on any device, written to be checked by eye.

Every other backend extends this one and is compared with it. What takes more than a few lines has
a file of its own, `torch_*`. Shape suffixes: see `interface`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanocore.kernels import Activation
from nanocore.kernels.attention import AttentionMetadata, KVCache, QKNorm, Rotary
from nanocore.kernels.candidates import NO_TOKEN
from nanocore.kernels.grouped_weight import QuantizedForm
from nanocore.kernels.gumbel_noise import best_with_noise, cached_rows
from nanocore.kernels.linear import Routing, SharedExpert
from nanocore.kernels.linear_weight import (
    FP8,
    Experts,
    ExpertWeights,
    LinearWeight,
    StackedExperts,
    TokenEmbedding,
    pack_rows,
    quantize_rows,
    stack,
    widen,
)
from nanocore.kernels.logit_edits import TokenMask
from nanocore.kernels.rank_group import RankGroup
from nanocore.kernels.sampling import Filters, LogprobTensors, Noise, TokenPlaces
from nanocore.kernels.step import GraphSupport, Replay, StepRows
from nanocore.kernels.torch_attention import paged_attention, store_kv
from nanocore.kernels.torch_sampling import edit_logits, filtered, logprobs


class TorchKernels:
    """Implements `interface.Kernels`.

    Methods call each other only where an override is to be called, too: what falls back to this
    backend is computed by it throughout.
    """

    name: str = "torch"
    variant: str = ""
    graph_support: GraphSupport = "never"
    block_multiple = 1
    kept_forms: frozenset[QuantizedForm] = frozenset()
    stacks_experts = True

    pack_linear = staticmethod(pack_rows)
    paged_attention = staticmethod(paged_attention)
    edit_logits = staticmethod(edit_logits)

    def linear(self, x_TI: Tensor, weight: LinearWeight, bias_O: Tensor | None = None) -> Tensor:
        if weight.segments:
            return self._linear_in_segments(x_TI, weight, bias_O)
        if weight.scale_O is None:
            return F.linear(x_TI, weight.data, bias_O)
        if weight.dtype == FP8:
            values_TI, scale_T = quantize_rows(x_TI)
            y_TO = F.linear(values_TI.float(), weight.data.float()) * scale_T[:, None]
            y_TO = y_TO * weight.scale_O
        else:
            y_TO = F.linear(x_TI.float(), widen(weight.data, weight.scale_O))
        return (y_TO if bias_O is None else y_TO + bias_O.float()).to(x_TI.dtype)

    def _linear_in_segments(
        self, x_TI: Tensor, weight: LinearWeight, bias_O: Tensor | None
    ) -> Tensor:
        parts = zip(weight.segments, weight.bias_of(bias_O), strict=True)
        return torch.cat([self.linear(x_TI, *part) for part in parts], dim=1)

    def gated_linear(
        self,
        x_TI: Tensor,
        weight: LinearWeight,
        bias_O: Tensor | None = None,
        activation: Activation = "silu",
    ) -> Tensor:
        return gated(self.linear(x_TI, weight, bias_O), activation)

    def activate(self, x_TI: Tensor, activation: Activation) -> Tensor:
        return activate(x_TI, activation)

    def logits(self, x_RE: Tensor, weight: LinearWeight, softcap: float = 0.0) -> Tensor:
        logits_RV = self.linear(x_RE, weight).float()
        return logits_RV.div_(softcap).tanh_().mul_(softcap) if softcap else logits_RV

    def embedding(self, token_ids_T: Tensor, embedding: TokenEmbedding) -> Tensor:
        weight, factor = embedding.weight, embedding.factor
        local_T = token_ids_T - embedding.first_token
        is_elsewhere_T = (local_T < 0) | (local_T >= weight.out_features)
        local_T = local_T.masked_fill(is_elsewhere_T, 0)
        x_TE = F.embedding(local_T, weight.data)
        if weight.scale_O is not None:
            x_TE = widen(x_TE, weight.scale_O[local_T])
        x_TE = x_TE.to(embedding.dtype)
        return (x_TE if factor == 1.0 else x_TE * factor).masked_fill_(is_elsewhere_T[:, None], 0)

    def begin_step(
        self, rows: StepRows, embedding: TokenEmbedding | None
    ) -> tuple[Tensor, Tensor | None]:
        block_table_BM = rows.append_blocks()
        if embedding is None:
            return block_table_BM, None
        return block_table_BM, self.embedding(rows.token_ids(), embedding)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add(self, x_TE: Tensor, residual_TE: Tensor) -> Tensor:
        return x_TE + residual_TE

    def all_reduce(self, x_TE: Tensor, group: RankGroup, bias_E: Tensor | None = None) -> Tensor:
        y_TE = group.all_reduce(x_TE)
        return y_TE if bias_E is None else y_TE + bias_E

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        residual = residual + x
        return self.rms_norm(residual, weight, eps), residual

    def select_add_rms_norm(
        self, x_TE: Tensor, residual_TE: Tensor, index_R: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        return self.rms_norm(residual_TE[index_R] + x_TE[index_R], weight, eps)

    def pack_experts(self, weights: ExpertWeights) -> Experts:
        return stack(weights)

    def moe(
        self,
        x_TE: Tensor,
        experts: Experts,
        routing: Routing,
        shared: SharedExpert | None = None,
        activation: Activation = "silu",
    ) -> Tensor:
        assert isinstance(experts, StackedExperts)
        return add_shared(moe(x_TE, experts, *route(routing), activation), shared)

    def rope_and_store_kv(
        self,
        qkv: Tensor,
        num_heads: int,
        qk_norm: QKNorm | None,
        rotary: Rotary,
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> Tensor:
        num_kv_heads, head_dim = cache.k_NSKD.shape[2:]
        heads = qkv.unflatten(-1, (-1, head_dim))
        q_THD, k_TKD, v_TKD = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        if qk_norm is not None:
            q_THD = rms_norm(q_THD, qk_norm.q_weight, qk_norm.eps)
            k_TKD = rms_norm(k_TKD, qk_norm.k_weight, qk_norm.eps)
        cos_TR, sin_TR = rotary.cos[metadata.positions_T], rotary.sin[metadata.positions_T]
        store_kv(rope(k_TKD, cos_TR, sin_TR), v_TKD, cache, metadata.slot_mapping_T)
        return rope(q_THD, cos_TR, sin_TR)

    def best_token(
        self,
        logits_RV: Tensor,
        first_token: int,
        noise: Noise | None = None,
        places: TokenPlaces | None = None,
        mask: TokenMask | None = None,
    ) -> tuple[Tensor, Tensor]:
        logits_RV = allowed_logits(logits_RV, first_token, mask)
        if noise is None:
            value_R, column_R = logits_RV.max(dim=1)
        else:
            value_R, column_R = best_with_noise(logits_RV, first_token, noise)
        column_R = column_R.masked_fill(~value_R.isfinite(), NO_TOKEN)
        if places is not None:
            places.write(column_R)
        return value_R, column_R

    def best_filtered_token(
        self, logits_RV: Tensor, noise: Noise, filters: Filters, mask: TokenMask | None = None
    ) -> tuple[Tensor, Tensor]:
        logits_RV = allowed_logits(logits_RV, 0, mask)
        return self.best_token(filtered(logits_RV, noise, filters), 0, noise)

    def logprobs(
        self, logits_RV: Tensor, token_ids_N: Tensor, num_top: int, index_N: Tensor | None = None
    ) -> LogprobTensors:
        return logprobs(logits_RV if index_N is None else logits_RV[index_N], token_ids_N, num_top)

    def capture(self, compute: Replay, max_tokens: int, max_samples: int) -> Replay | None:
        return None


def allowed_logits(logits_RV: Tensor, first_token: int, mask: TokenMask | None) -> Tensor:
    """A copy that has minus infinity for what the mask forbids; without one the same."""
    if mask is None:
        return logits_RV
    allowed_RV = torch.empty_like(logits_RV)
    for rows in cached_rows(logits_RV):
        of_rows = TokenMask(mask.words_MW, mask.index_R[rows])
        is_allowed_CV = of_rows.is_allowed(first_token, logits_RV.shape[1])
        allowed_RV[rows] = logits_RV[rows].masked_fill(~is_allowed_CV, -torch.inf)
    return allowed_RV


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x_float = x.float()
    normed = x_float * torch.rsqrt(x_float.pow(2).mean(-1, keepdim=True) + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype)


def rope(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout; cos and sin of each token, in x's dtype."""
    cos, sin = cos_TR[:, None], sin_TR[:, None]
    first, second, *rest = x_THD.split(cos_TR.shape[-1], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, *rest), dim=-1)


def activate(x: Tensor, activation: Activation) -> Tensor:
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
    """Add the shared expert's output to the chosen experts'."""
    return out_TE if shared is None else out_TE + shared.gate_T1.sigmoid() * shared.out_TE


def moe(
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
