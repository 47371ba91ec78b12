"""Weights into tiles that native kernels read: as they are, quantized, or as stored in groups.

Tiles are read as streams, so they lie in pages of 2 MiB where the system has them. Small weights,
such as those of a hundred experts, share pages, which would be half empty otherwise. Memory goes
back when nothing in it is used any more; so does what the C library keeps of buffers that weights
were read into: it was half as much as the weights of a hundred experts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref
from dataclasses import replace
from threading import Lock
from typing import Final, TypeVar

import numpy as np
import torch
from torch import Tensor

from nanocore.kernels.cpu import grouped_weight
from nanocore.kernels.cpu.library import Library, LinearWeightStruct
from nanocore.kernels.cpu.program import Workspace
from nanocore.kernels.cpu.structs import DTYPES, weight_struct
from nanocore.kernels.grouped_weight import CheckpointWeight, Float8Weight, GroupedWeight
from nanocore.kernels.linear_weight import LinearWeight, check_quantization_name

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


class WeightPacking:
    """Packs weights by a library, with the threads of a workspace.

    keeps_activations: see `CpuKernels`.
    """

    def __init__(self, library: Library, workspace: Workspace, keeps_activations: bool) -> None:
        self._library = library
        self._workspace = workspace
        self._keeps_activations = keeps_activations
        self.memory = WeightMemory()

    def pack(self, weight: CheckpointWeight, quantization: str | None) -> LinearWeight:
        check_quantization_name(quantization, ("int8", "int4"))
        if isinstance(weight, Float8Weight):
            weight = weight.in_integers()
        if isinstance(weight, GroupedWeight):
            return self._pack_groups(weight)
        packed, struct = self._with_memory(self._described(weight, quantization))
        weight = weight.contiguous()
        self._library.call(
            "pack", self._workspace.handle, DTYPES[weight.dtype], weight.data_ptr(), byref(struct)
        )
        return packed

    def _described(self, weight_OI: Tensor, quantization: str | None) -> LinearWeight:
        out_features, in_features = weight_OI.shape
        if quantization is None:
            return LinearWeight(out_features, in_features, weight_OI.dtype, torch.empty(0))
        make = {"int4": grouped_weight.four_bits, "int8": grouped_weight.eight_bits}[quantization]
        return make(out_features, in_features, keeps_activations=self._keeps_activations)

    def _pack_groups(self, weight: GroupedWeight) -> LinearWeight:
        weight = grouped_weight.in_groups_that_fit(weight)
        described = grouped_weight.described(weight, keeps_activations=self._keeps_activations)
        packed, struct = self._with_memory(described)
        rows = grouped_weight.rows_struct(weight)
        self._library.call("pack_groups", self._workspace.handle, byref(rows), byref(struct))
        return packed

    def _with_memory(self, described: _Weight) -> tuple[_Weight, LinearWeightStruct]:
        struct = weight_struct(described)
        packed = self.memory.take(self._library.call("packed_bytes", byref(struct)))
        struct.packed = packed.data_ptr()
        return replace(described, data=packed), struct
