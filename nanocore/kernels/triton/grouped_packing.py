"""Weights of small numbers as kernels on a GPU read them, and how stored ones are packed so.

A row's inputs are in chunks of a few planes, of as many inputs as a matrix product takes at a time.
A 32-bit word has a pair of neighbours of each plane, one in each half: 8 numbers of 4 bits or 4 of
8, so that a shift and a mask make two operands of a whole register, and no plane has two scales.

What is to be known of a chunk lies beside it in words too, those of all outputs side by side: its
scales as the checkpoint has them, zero points, minima. Nothing stored is rounded by packing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from nanocore.kernels.grouped_weight import SUPER_BLOCK, Float8Weight, GroupedWeight
from nanocore.kernels.linear_weight import LinearWeight

Scales = Literal["float16", "bfloat16", "float32", "super"]
_PLANES: Final = (64, 32, 16)
_HALVES: Final[dict[torch.dtype, Scales]] = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a weight's words.

    bits: 4 or 8. is_float8: they are E4M3. plane: inputs of one. num_scales: of a chunk. scales:
    their form, two in a word, or one; or bytes times a float16 of each 256 inputs.
    has_zeros: a chunk has zero points, bytes of one word. has_minima: what is taken off.
    """

    bits: int
    plane: int
    num_scales: int
    scales: Scales
    has_zeros: bool = False
    has_minima: bool = False
    is_float8: bool = False

    @property
    def num_planes(self) -> int:
        return 16 // self.bits

    @property
    def chunk(self) -> int:
        return self.num_planes * self.plane

    @property
    def num_scale_words(self) -> int:
        if self.scales == "super":
            return 2 if self.has_minima else 1
        if self.scales == "float32":
            return self.num_scales * (2 if self.has_minima else 1)
        return self.num_scales // 2

    @property
    def num_words(self) -> int:
        return self.num_scale_words + self.has_zeros


@dataclass(frozen=True, slots=True)
class GroupedLinear(LinearWeight):
    """data: int32 [O, chunks * plane / 2]. scale_O is None.

    scales: int32 [chunks * num_words, O]. super_scales: int32 [ceil(I / 256), O], two float16, of
    scales and of minima. permutation_I: int64, which input each column is for.
    """

    layout: Layout = Layout(4, 64, 2, "float32")
    scales: Tensor = torch.empty(0)
    super_scales: Tensor | None = None
    permutation_I: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        parts = (self.data, self.scales, self.super_scales, self.permutation_I)
        return sum(part.nbytes for part in parts if part is not None)


def pack_groups(weight: GroupedWeight) -> GroupedLinear:
    """The same numbers.

    Raises ValueError: a group's size, or a codebook, is none that our kernels on a GPU have.
    """
    if weight.codebook is not None:
        weight = _without_codebook(weight)
    layout = _layout(weight)
    scales = [_spread(weight, layout, part) for part in _parts(weight, layout)]
    words = _scale_words(scales, layout)
    if weight.zero_OG is not None:
        words.append(_bytes(_spread(weight, layout, weight.zero_OG)))
    super_scales = None
    if weight.super_scale_OS is not None:
        low, high = weight.super_scale_OS, weight.super_minimum_OS
        super_scales = _pair(low, torch.zeros_like(low) if high is None else high).t().contiguous()
    permutation_I = weight.permutation_I
    return GroupedLinear(
        weight.out_features,
        weight.in_features,
        torch.uint8,
        _pack(weight.values_OI, layout),
        layout=layout,
        scales=torch.cat(words, 2).flatten(1).t().contiguous(),
        super_scales=super_scales,
        permutation_I=None if permutation_I is None else permutation_I.long(),
    )


def pack_float8(weight: Float8Weight) -> GroupedLinear:
    """Pack E4M3; a value that is not a number makes its group's scale NaN."""
    out_features, in_features = weight.values_OI.shape
    scale_OG, group_size = weight.scale.float(), in_features
    if weight.has_blocks:
        scale_OG = scale_OG.repeat_interleave(weight.block, 0)[:out_features]
        group_size = weight.block
    bits_OI = weight.values_OI.view(torch.uint8)
    is_nan_OI = (bits_OI & 0x7F) == 0x7F
    if bool(is_nan_OI.any()):
        scale_OG = scale_OG.clone()
        output_N, input_N = is_nan_OI.nonzero(as_tuple=True)
        scale_OG[output_N, input_N // group_size] = torch.nan
    groups = GroupedWeight(bits_OI, 8, group_size, scale_OG)
    layout = _layout(groups, is_float8=True)
    words = _scale_words([_spread(groups, layout, scale_OG)], layout)
    return GroupedLinear(
        out_features,
        in_features,
        torch.uint8,
        _pack(bits_OI, layout),
        layout=layout,
        scales=torch.cat(words, 2).flatten(1).t().contiguous(),
    )


def _layout(weight: GroupedWeight, is_float8: bool = False) -> Layout:
    group, num_groups = weight.group_size, weight.scale_OG.shape[1]
    num_planes = 16 // weight.bits
    planes = [size for size in _PLANES if num_groups == 1 or group % size == 0]
    if not planes:
        raise ValueError(
            f"groups of {group} inputs: on a GPU a group's size must be a multiple of 16; "
            "a CPU takes others, too"
        )
    # Larger planes are fewer steps; but what they fill up should be small.
    waste = {size: -weight.in_features % (num_planes * size) for size in planes}
    plane = next((s for s in planes if 16 * waste[s] <= weight.in_features), planes[-1])
    num_scales = num_planes if num_groups > 1 and group % (2 * plane) else 2
    has_minima = weight.minimum_OG is not None
    scales: Scales = "float32"
    if weight.super_scale_OS is not None:
        scales = "super"
    elif not has_minima:
        scales = _HALVES.get(weight.scale_OG.dtype, "float32")
    has_zeros = weight.zero_OG is not None
    return Layout(weight.bits, plane, num_scales, scales, has_zeros, has_minima, is_float8)


def _parts(weight: GroupedWeight, layout: Layout) -> list[Tensor]:
    parts = [weight.scale_OG]
    if weight.minimum_OG is not None:
        parts.append(weight.minimum_OG)
    return [part.float() for part in parts] if layout.scales == "float32" else parts


def _spread(weight: GroupedWeight, layout: Layout, part_OG: Tensor) -> Tensor:
    """[O, chunks, num_scales]: of groups that are smaller than a chunk, or larger."""
    num_chunks = -(-weight.in_features // layout.chunk)
    starts = torch.arange(num_chunks * layout.num_scales, device=part_OG.device)
    groups = starts * (layout.chunk // layout.num_scales) // weight.group_size
    groups = groups.clamp_(max=part_OG.shape[1] - 1)
    return part_OG[:, groups].unflatten(1, (num_chunks, layout.num_scales))


def _scale_words(parts: list[Tensor], layout: Layout) -> list[Tensor]:
    """int32 [O, chunks, words] each."""
    if layout.scales == "float32":
        return [part.contiguous().view(torch.int32) for part in parts]
    if layout.scales == "super":
        return [_bytes(part) for part in parts]
    [scales] = parts
    return [_pair(scales[..., ::2], scales[..., 1::2])]


def _bytes(part: Tensor) -> Tensor:
    """int32 [..., 1] of up to four bytes."""
    words = torch.zeros(part.shape[:-1], dtype=torch.int32, device=part.device)
    for i in range(part.shape[-1]):
        words |= (part[..., i].int() & 0xFF) << (8 * i)
    return words[..., None]


def _pair(low: Tensor, high: Tensor) -> Tensor:
    """int32 of two numbers of 16 bits each."""
    low, high = (half.contiguous().view(torch.int16).int() for half in (low, high))
    return (low & 0xFFFF) | (high << 16)


def _pack(values_OI: Tensor, layout: Layout) -> Tensor:
    """int32 [O, chunks * plane / 2]; inputs that there are none of are zeros."""
    missing = -values_OI.shape[1] % layout.chunk
    if missing:
        values_OI = torch.nn.functional.pad(values_OI, (0, missing))
    pairs = values_OI.unflatten(1, (-1, layout.num_planes, layout.plane // 2, 2))
    words = torch.zeros(*pairs.shape[:2], layout.plane // 2, dtype=torch.int32, device=pairs.device)
    for plane in range(layout.num_planes):
        for half in range(2):
            words |= pairs[:, :, plane, :, half].int() << (layout.bits * plane + 16 * half)
    return words.flatten(1)


def _without_codebook(weight: GroupedWeight) -> GroupedWeight:
    assert weight.codebook is not None
    doubled = weight.codebook.float() * 2  # MXFP4 has halves
    if not bool(((doubled == doubled.round()) & (doubled.abs() < 128)).all()):
        raise ValueError("a codebook that is not of whole numbers; on a GPU there are no others")
    values_OI = (doubled + 128).to(torch.uint8)[weight.values_OI.long()]
    return GroupedWeight(
        values_OI,
        8,
        weight.group_size,
        weight.scale_OG.float() / 2,
        permutation_I=weight.permutation_I,
    )


assert SUPER_BLOCK % 64 == 0, "no chunk of groups of 32 or 16 has two super scales"
