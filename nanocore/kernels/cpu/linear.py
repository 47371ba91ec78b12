"""Products, embeddings and experts by the native kernels, of weights that are packed into tiles.

Tiles are read as streams, so they lie in pages of 2 MiB where the system has them. Small weights,
such as those of a hundred experts, share pages, which would be half empty otherwise. Memory goes
back when nothing in it is used any more; so does what the C library keeps of buffers that weights
were read into: it was half as much as the weights of a hundred experts. Shape suffixes:
see `interface`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Lock
from typing import Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from nanocore.kernels import Activation
from nanocore.kernels.cpu import grouped_weight
from nanocore.kernels.cpu.library import Library, LinearWeightStruct, StepStruct
from nanocore.kernels.cpu.program import NativeKernels
from nanocore.kernels.cpu.structs import (
    DTYPES,
    PackedExperts,
    expert_operands_struct,
    weight_struct,
)
from nanocore.kernels.grouped_weight import (
    CheckpointWeight,
    Float8Weight,
    GroupedWeight,
    QuantizedForm,
)
from nanocore.kernels.linear import Routing, SharedExpert
from nanocore.kernels.linear_weight import (
    Experts,
    LinearWeight,
    TokenEmbedding,
    check_quantization_name,
)

_PAGE_BYTES: Final = 2 << 20
_SMALL_BYTES: Final = 16 << 20
_SHARED_BYTES: Final = 64 << 20
"""Size of a piece that small weights share; unused memory of it is never touched."""
_ALIGNMENT: Final = 4096


def huge_pages(num_bytes: int) -> Tensor:
    memory = np.empty(num_bytes + _PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % _PAGE_BYTES
    return torch.from_numpy(memory[start : start + num_bytes])


def _find_trim() -> Callable[[int], int]:
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim or (lambda _: 0)  # other C libraries have no such function


_trim: Final = _find_trim()


class WeightMemory:
    """Gives out memory; from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._shared, self._used = torch.empty(0, dtype=torch.uint8), 0

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], of any content."""
        if num_bytes > _SMALL_BYTES:
            _trim(0)
            return huge_pages(num_bytes)
        with self._lock:
            if self._used + num_bytes > len(self._shared):
                _trim(0)
                self._shared, self._used = huge_pages(_SHARED_BYTES), 0
            start = self._used
            self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            return self._shared[start : start + num_bytes]


TILE_COLUMNS: Final = 32
_Weight = TypeVar("_Weight", bound=LinearWeight)
_GATES: Final = {"silu": 1, "gelu": 2}


class CpuLinear(NativeKernels):
    """Implements `LinearKernels`. keeps_activations: see `CpuKernels`."""

    kept_forms: frozenset[QuantizedForm] = frozenset({"grouped", "float8"})
    stacks_experts = False
    pack_experts = staticmethod(PackedExperts)

    def __init__(
        self, library: Library, cores: Sequence[int] | None, *, keeps_activations: bool
    ) -> None:
        super().__init__(library, cores)
        self.memory = WeightMemory()
        self._keeps_activations = keeps_activations

    def pack_linear(
        self,
        weight: CheckpointWeight,
        quantization: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> LinearWeight:
        check_quantization_name(quantization, ("int8", "int4"))
        if isinstance(weight, Float8Weight):
            weight = weight.in_integers()
        if isinstance(weight, GroupedWeight):
            return self._pack_groups(weight)
        packed, struct = self._with_memory(self._described(weight, quantization))
        weight = weight.contiguous()
        address = weight.data_ptr()
        self.library.call("pack", self.workspace.handle, DTYPES[weight.dtype], address, struct)
        return packed

    def linear(self, x_TI: Tensor, weight: LinearWeight, bias_O: Tensor | None = None) -> Tensor:
        return self._linear(x_TI, weight, bias_O, x_TI.dtype)

    def gated_linear(
        self,
        x_TI: Tensor,
        weight: LinearWeight,
        bias_O: Tensor | None = None,
        activation: Activation = "silu",
    ) -> Tensor:
        if weight.out_features % (2 * TILE_COLUMNS) == 0 and not weight.segments:
            return self._linear(x_TI, weight, bias_O, x_TI.dtype, _GATES[activation])
        return self._gate(self.linear(x_TI, weight, bias_O), activation)

    def activate(self, x_TI: Tensor, activation: Activation) -> Tensor:
        # torch computes the last few values of a batch by other instructions than the rest.
        return self._gate(torch.cat((x_TI, torch.ones_like(x_TI)), dim=1), activation)

    def logits(self, x_RE: Tensor, weight: LinearWeight, softcap: float = 0.0) -> Tensor:
        logits_RV = self._linear(x_RE, weight, None, torch.float32)
        if softcap:
            self.run("softcap", logits_RV, logits_RV, logits_RV.shape[1], softcap)
        return logits_RV

    def embedding(self, token_ids_T: Tensor, embedding: TokenEmbedding) -> Tensor:
        weight = embedding.weight
        out_TE = self.empty(token_ids_T, weight.in_features, embedding.dtype)
        self.run(
            "embedding", out_TE, weight_struct(weight), embedding.first_token, embedding.factor,
            out_TE, step=StepStruct(token_ids_T=token_ids_T.data_ptr()),
        )  # fmt: skip
        return out_TE

    def moe(
        self,
        x_TE: Tensor,
        experts: Experts,
        routing: Routing,
        shared: SharedExpert | None = None,
        activation: Activation = "silu",
    ) -> Tensor:
        assert isinstance(experts, PackedExperts)
        out_TE = self.empty(x_TE, x_TE.shape[1], x_TE.dtype)
        self.run(
            "moe", x_TE, x_TE, x_TE.stride(0), experts.struct,
            expert_operands_struct(routing, shared), _GATES[activation], out_TE,
        )  # fmt: skip
        return out_TE

    def _linear(
        self,
        x_TI: Tensor,
        weight: LinearWeight,
        bias_O: Tensor | None,
        out_dtype: torch.dtype,
        gate: int = 0,
    ) -> Tensor:
        width = weight.out_features // 2 if gate else weight.out_features
        out_TO = self.empty(x_TI, width, out_dtype)
        start = out_TO.data_ptr()
        for segment, bias in weight.parts(bias_O):
            self.run(
                "linear", x_TI, x_TI, x_TI.stride(0), weight_struct(segment), bias, gate,
                DTYPES[out_dtype], start, out_TO.stride(0),
            )  # fmt: skip
            start += segment.out_features * out_TO.element_size()
        return out_TO

    def _gate(self, x_TO: Tensor, activation: Activation) -> Tensor:
        out_TO = self.empty(x_TO, x_TO.shape[1] // 2, x_TO.dtype)
        self.run("gate", x_TO, x_TO, out_TO.shape[1], _GATES[activation], out_TO)
        return out_TO

    def _described(self, weight_OI: Tensor, quantization: str | None) -> LinearWeight:
        out_features, in_features = weight_OI.shape
        if quantization is None:
            return LinearWeight(out_features, in_features, weight_OI.dtype, torch.empty(0))
        return grouped_weight.in_groups(
            out_features, in_features, quantization, keeps_activations=self._keeps_activations
        )

    def _pack_groups(self, weight: GroupedWeight) -> LinearWeight:
        weight = grouped_weight.in_groups_that_fit(weight)
        described = grouped_weight.described(weight, keeps_activations=self._keeps_activations)
        packed, struct = self._with_memory(described)
        rows = grouped_weight.rows_struct(weight)
        self.library.call("pack_groups", self.workspace.handle, rows, struct)
        return packed

    def _with_memory(self, described: _Weight) -> tuple[_Weight, LinearWeightStruct]:
        struct = weight_struct(described)
        packed = self.memory.take(self.library.call("packed_bytes", struct))
        struct.packed = packed.data_ptr()
        return replace(described, data=packed), struct
