"""Grouped weights as the native kernels keep them: which layout each form of weight has in tiles.

groups.h has the layouts. Scales and minima stay in the type that a checkpoint has them in; groups
that are larger than the kernels' largest are cut, since parts of a group may have the same scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from msgspec.structs import replace
from torch import Tensor

from nanocore.kernels.cpu.library import GroupedRowsStruct, GroupFormatStruct
from nanocore.kernels.group_quantization import GROUP_SIZE
from nanocore.kernels.grouped_weight import GroupedWeight
from nanocore.kernels.linear_weight import LinearWeight

GROUP_SIZES: Final = (16, 32, 64, 128)
_SCALES: Final = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}
_PER_OUTPUT, _TWO_LEVEL_SCALES = 0, 4
_NO_MINIMA, _ZEROS, _TWO_LEVEL_MINIMA, _FLOAT_MINIMA = range(4)


@dataclass(frozen=True, slots=True)
class CpuGroupedWeight(LinearWeight):
    """A weight in groups; data: tiles.

    bits, group_size: of values. scales, minima: as groups.h numbers them. codebook: float32 [16],
    what activations as floats are multiplied with; without it they are quantized to eight bits.
    permutation_I: int32, which input each of the weight's is.
    """

    bits: int = 4
    group_size: int = 32
    scales: int = _PER_OUTPUT
    minima: int = _NO_MINIMA
    codebook: Tensor | None = None
    permutation_I: Tensor | None = None

    @property
    def format(self) -> GroupFormatStruct:
        return GroupFormatStruct(self.bits, self.scales, self.minima, self.group_size)

    @property
    def num_bytes(self) -> int:
        parts = (self.data, self.scale_O, self.permutation_I)
        return sum(part.nbytes for part in parts if part is not None)


def in_groups(
    out_features: int, in_features: int, quantization: str, *, keeps_activations: bool
) -> CpuGroupedWeight:
    """Weight that floats are quantized to; of int8 groups are symmetric, with float16 scales."""
    bits, zero, scales, minima = {
        "int4": (4, 0, _TWO_LEVEL_SCALES, _TWO_LEVEL_MINIMA),
        "int8": (8, 128, _SCALES[torch.float16], _NO_MINIMA),
    }[quantization]
    return CpuGroupedWeight(
        out_features, in_features, torch.uint8, torch.empty(0), None, bits, GROUP_SIZE, scales,
        minima, _numbers(bits, zero) if keeps_activations else None,
    )  # fmt: skip


def _numbers(bits: int, zero: int) -> Tensor:
    """The codebook of integers, for activations that are kept: of eight bits it holds the zero."""
    numbers = torch.arange(16) - zero if bits == 4 else torch.full((16,), zero)
    return numbers.float()


def in_groups_that_fit(weight: GroupedWeight) -> GroupedWeight:
    """The same weight in groups of one of `GROUP_SIZES`, unless it has one scale for each output.

    Raises ValueError: there are none.
    """
    size = weight.group_size
    if size in GROUP_SIZES or has_output_scales(weight):
        return weight
    num_groups = weight.scale_OG.shape[1]
    part = next((part for part in reversed(GROUP_SIZES) if size % part == 0), None)
    if num_groups == 1:
        part = GROUP_SIZES[-1]
    if part is None:
        raise ValueError(f"groups of {size} inputs: there are kernels for multiples of 16")
    times = -(-min(size, weight.in_features) // part)

    def cut(of_OG: Tensor | None) -> Tensor | None:
        if of_OG is None:
            return None
        return of_OG.repeat_interleave(times, 1)[:, : -(-weight.in_features // part)].contiguous()

    scale_OG = cut(weight.scale_OG)
    assert scale_OG is not None
    return replace(
        weight, group_size=part, scale_OG=scale_OG, zero_OG=cut(weight.zero_OG),
        minimum_OG=cut(weight.minimum_OG),
    )  # fmt: skip


def has_output_scales(weight: GroupedWeight) -> bool:
    """Whether products are scaled once they are summed up."""
    is_plain = weight.zero_OG is weight.minimum_OG is weight.codebook is weight.super_scale_OS
    return weight.bits == 8 and weight.scale_OG.shape[1] == 1 and is_plain


def described(weight: GroupedWeight, *, keeps_activations: bool) -> CpuGroupedWeight:
    """Describe how a weight of `in_groups_that_fit` lies in tiles, which are not there yet.

    keeps_activations: they are not to be quantized.
    """
    scales = _TWO_LEVEL_SCALES if weight.super_scale_OS is not None else None
    scale_O, group_size = None, weight.group_size
    if scales is None:
        scales = _SCALES[weight.scale_OG.dtype]
    if has_output_scales(weight):
        scales, group_size = _PER_OUTPUT, GROUP_SIZES[-1]
        scale_O = weight.scale_OG[:, 0].float()
        scale_O = torch.nn.functional.pad(scale_O, (0, -len(scale_O) % 32)).contiguous()
    minima = _NO_MINIMA
    if weight.minimum_OG is not None:
        minima = _FLOAT_MINIMA if weight.super_minimum_OS is None else _TWO_LEVEL_MINIMA
    elif weight.zero_OG is not None:
        minima = _ZEROS
    zero = 0 if minima != _NO_MINIMA else 1 << (weight.bits - 1)
    codebook = weight.codebook
    if codebook is None and keeps_activations:
        codebook = _numbers(weight.bits, zero)
    return CpuGroupedWeight(
        weight.out_features, weight.in_features, torch.uint8, torch.empty(0), scale_O, weight.bits,
        group_size, scales, minima, codebook, weight.permutation_I,
    )  # fmt: skip


def rows_struct(weight: GroupedWeight) -> GroupedRowsStruct:
    """Addresses of its tensors, which must outlive it."""
    minimum = weight.minimum_OG if weight.minimum_OG is not None else weight.zero_OG
    parts = (weight.values_OI, weight.scale_OG, minimum, weight.super_scale_OS,
             weight.super_minimum_OS)  # fmt: skip
    assert all(part is None or part.is_contiguous() for part in parts)
    return GroupedRowsStruct(*(None if part is None else part.data_ptr() for part in parts))
