"""Operands of the native kernels as the structs of their C interface.

A struct holds addresses: what it was made of must outlive it.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from nanocore.kernels.attention import AttentionMetadata, KVCache
from nanocore.kernels.cpu.grouped_weight import CpuGroupedWeight
from nanocore.kernels.cpu.library import (
    CacheLayoutStruct,
    DeltaHeadsStruct,
    EditLogitsStruct,
    ExpertOperandsStruct,
    ExpertWeightsStruct,
    LinearWeightStruct,
    NormWeightStruct,
    RankGroupStruct,
    StateLayoutStruct,
    StepStruct,
    TokenListStruct,
    TokenMaskStruct,
)
from nanocore.kernels.linear import Routing, SharedExpert
from nanocore.kernels.linear_weight import ExpertWeights, LinearWeight
from nanocore.kernels.logit_edits import LogitEdits, TokenMask
from nanocore.kernels.states import DeltaRule, StateCache
from nanocore.kernels.step import SharedMemoryGroup

DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1}
"""Numbers of the activations' dtypes in the kernels."""
_INTEGERS, _CODEBOOK = 3, 4
"""Numbers of further kinds of packed weights."""


def weight_struct(weight: LinearWeight) -> LinearWeightStruct:
    struct = LinearWeightStruct(
        packed=weight.data.data_ptr(),
        scale=_address(weight.scale_O),
        in_features=weight.in_features,
        out_features=weight.out_features,
    )
    if isinstance(weight, CpuGroupedWeight):
        struct.kind = _INTEGERS if weight.codebook is None else _CODEBOOK
        struct.format = weight.format
        struct.codebook = _address(weight.codebook)
        struct.permutation = _address(weight.permutation_I)
    else:
        struct.kind = DTYPES[weight.dtype]
    return struct


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def norm_struct(weight: Tensor, eps: float) -> NormWeightStruct:
    return NormWeightStruct(weight.data_ptr(), weight.dtype == torch.float32, eps)


def cache_struct(cache: KVCache) -> CacheLayoutStruct:
    """Addresses of one layer's K and V, and of their scales if they are quantized."""
    _, block_size, num_heads, head_dim = cache.k_NSKD.shape
    return CacheLayoutStruct(
        k=cache.k_NSKD.data_ptr(),
        v=cache.v_NSKD.data_ptr(),
        k_scale=_address(cache.k_scale_NSK),
        v_scale=_address(cache.v_scale_NSK),
        num_heads=num_heads,
        head_dim=head_dim,
        block_size=block_size,
        block_bytes=cache.block_bytes,
        group=cache.group,
    )


def state_struct(states_N: Tensor, cache: StateCache, start: int = 0) -> StateLayoutStruct:
    """Addresses of one kind of a layer's states. start: of its inputs among those of drafts."""
    drafts, strides = cache.drafts_RKI, (0, 0)
    if drafts is not None:
        strides = drafts.stride(0) * drafts.itemsize, drafts.stride(1) * drafts.itemsize
        drafts = drafts[..., start:]
    return StateLayoutStruct(
        states_N.data_ptr(), cache.block_size, states_N.stride(0) * states_N.itemsize, cache.group,
        _address(drafts), *strides,
    )  # fmt: skip


def kept_struct(kept_RKE: Tensor) -> StateLayoutStruct:
    """Addresses of hidden states that rows keep, as those of drafts."""
    strides = (kept_RKE.stride(dim) * kept_RKE.itemsize for dim in (0, 1))
    return StateLayoutStruct(None, 1, 0, 0, kept_RKE.data_ptr(), *strides)


def delta_struct(rule: DeltaRule) -> DeltaHeadsStruct:
    return DeltaHeadsStruct(
        rule.num_key_heads, len(rule.decay_P), rule.key_dim, rule.value_dim, rule.is_tiled,
        rule.decay_P.data_ptr(), rule.time_bias_P.data_ptr(),
    )  # fmt: skip


def group_struct(group: SharedMemoryGroup) -> RankGroupStruct:
    return RankGroupStruct(
        group.counters.data_ptr(),
        group.buffers.data_ptr(),
        group.buffer_bytes,
        group.rank,
        group.size,
        ctypes.addressof(group.entered),
    )


def step_struct(metadata: AttentionMetadata) -> StepStruct:
    table, table_rows_B = metadata.block_table, metadata.table_rows_B
    assert table.stride(1) == 1, "a row's block ids are adjacent"
    assert table_rows_B is None or table_rows_B.is_contiguous()
    return StepStruct(
        num_seqs=len(metadata.seq_lens),
        positions_T=metadata.positions_T.data_ptr(),
        slots_GT=metadata.slot_mapping_T.data_ptr(),
        query_start_A=metadata.query_start_A.data_ptr(),
        seq_lens_B=metadata.seq_lens_B.data_ptr(),
        block_tables=table.data_ptr(),
        block_table_stride=table.stride(0),
        rows_B=_address(table_rows_B),
        num_right_B=_address(metadata.num_right_B),
        num_drafts_B=_address(metadata.num_drafts_B),
    )


def mask_struct(mask: TokenMask | None) -> TokenMaskStruct | None:
    if mask is None:
        return None
    words_MW, index_R = mask.words_MW, mask.index_R
    assert words_MW.is_contiguous()
    assert index_R.is_contiguous()
    return TokenMaskStruct(words_MW.data_ptr(), words_MW.shape[1], index_R.data_ptr())


def edits_struct(logits_RV: Tensor, edits: LogitEdits) -> EditLogitsStruct:
    assert logits_RV.stride(1) == edits.token_table.stride(1) == 1, "rows' values are adjacent"
    lists = edits.lists

    def of(starts: Tensor, ids: Tensor) -> TokenListStruct:
        return TokenListStruct(starts.data_ptr(), ids.data_ptr())

    return EditLogitsStruct(
        logits=logits_RV.data_ptr(),
        size=logits_RV.shape[1],
        stride=logits_RV.stride(0),
        token_table=edits.token_table.data_ptr(),
        table_stride=edits.token_table.stride(0),
        table_rows=edits.rows_R.data_ptr(),
        num_prompt_tokens=edits.num_prompt_tokens_R.data_ptr(),
        num_tokens=edits.num_tokens_R.data_ptr(),
        min_tokens=edits.min_tokens_R.data_ptr(),
        repetition_penalty=edits.repetition_penalty_R.data_ptr(),
        frequency_penalty=edits.frequency_penalty_R.data_ptr(),
        presence_penalty=edits.presence_penalty_R.data_ptr(),
        allowed=of(lists.allowed_starts_A, lists.allowed_N),
        biased=of(lists.bias_starts_A, lists.biased_N),
        biases=lists.biases_N.data_ptr(),
        stops=of(lists.stop_starts_A, lists.stops_N),
        sequence_starts=lists.sequence_starts_A.data_ptr(),
        bad=of(lists.bad_starts, lists.bad_N),
    )


class PackedExperts:
    """All experts of a layer. Implements `Experts`.

    Raises ValueError: those of a projection are in several forms.
    """

    def __init__(self, weights: ExpertWeights) -> None:
        arrays = []
        for projection in (weights.gates, weights.ups, weights.downs):
            structs = [weight_struct(weight) for weight in projection]
            if len({_form(struct) for struct in structs}) != 1:
                raise ValueError("experts of a layer are stored in different ways")
            arrays.append((LinearWeightStruct * len(structs))(*structs))
        self.struct, self.weights = ExpertWeightsStruct(len(weights.gates), *arrays), weights


def _form(struct: LinearWeightStruct) -> tuple[int | bool, ...]:
    group = struct.format
    return (struct.kind, struct.in_features, struct.out_features, bool(struct.permutation),
            group.bits, group.scales, group.minima, group.group)  # fmt: skip


def expert_operands_struct(routing: Routing, shared: SharedExpert | None) -> ExpertOperandsStruct:
    """Operands of the choice of experts, and the shared one."""
    logits_TX = routing.logits_TX
    struct = ExpertOperandsStruct(
        logits=logits_TX.data_ptr(),
        logits_stride=logits_TX.stride(0),
        num_chosen=routing.num_chosen,
        is_normalized=routing.is_normalized,
        is_sigmoid=routing.score == "sigmoid",
        bias=_address(routing.bias_X),
        epsilon=routing.epsilon,
        factor=routing.factor,
    )
    if shared is not None:
        struct.shared_gate, struct.shared_out = shared.gate_T1.data_ptr(), shared.out_TE.data_ptr()
        struct.shared_gate_stride = shared.gate_T1.stride(0)
        struct.shared_out_stride = shared.out_TE.stride(0)
    return struct
