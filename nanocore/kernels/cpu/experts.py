"""Experts and their routing as the structs of the native kernels' C interface."""

from __future__ import annotations

from nanocore.kernels.cpu.library import (
    ExpertOperandsStruct,
    ExpertWeightsStruct,
    LinearWeightStruct,
)
from nanocore.kernels.cpu.structs import weight_struct
from nanocore.kernels.experts import ExpertWeights
from nanocore.kernels.interface import Routing, SharedExpert


class PackedExperts:
    """All of a layer's, each projection in one form. Implements `Experts`."""

    def __init__(self, weights: ExpertWeights) -> None:
        self.struct, self.weights = experts_struct(weights), weights


def experts_struct(weights: ExpertWeights) -> ExpertWeightsStruct:
    """All experts of a layer, each projection in one form. Weights must outlive it.

    Raises:
        ValueError: they are in several.
    """
    arrays = []
    for projection in (weights.gates, weights.ups, weights.downs):
        structs = [weight_struct(weight) for weight in projection]
        if len({_form(struct) for struct in structs}) != 1:
            raise ValueError("experts of a layer are stored in different ways")
        arrays.append((LinearWeightStruct * len(structs))(*structs))
    return ExpertWeightsStruct(len(weights.gates), *arrays)


def _form(struct: LinearWeightStruct) -> tuple[int | bool, ...]:
    group = struct.format
    return (struct.kind, struct.in_features, struct.out_features, bool(struct.permutation),
            group.bits, group.scales, group.minima, group.group)  # fmt: skip


def expert_operands_struct(routing: Routing, shared: SharedExpert | None) -> ExpertOperandsStruct:
    """How experts are chosen, and the shared one."""
    logits_TX = routing.logits_TX
    struct = ExpertOperandsStruct(
        logits=logits_TX.data_ptr(),
        logits_stride=logits_TX.stride(0),
        num_chosen=routing.num_chosen,
        is_normalized=routing.is_normalized,
    )
    if shared is not None:
        struct.shared_gate, struct.shared_out = shared.gate_T1.data_ptr(), shared.out_TE.data_ptr()
        struct.shared_gate_stride = shared.gate_T1.stride(0)
        struct.shared_out_stride = shared.out_TE.stride(0)
    return struct
