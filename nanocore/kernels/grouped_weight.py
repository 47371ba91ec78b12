"""Weights of small numbers as checkpoints store them: the one form that every format is read into.

A weight's inputs are in groups that share a scale: w = scale * (q - zero), or scale * q - minimum
where a format has minima, or scale * codebook[q]. Values, scales and zero points are kept as they
were stored, so what a checkpoint says is what kernels compute with. `dequantize` is the definition
that all kernels are compared with.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

_ROWS_AT_ONCE = 64
"""Rows of a weight that are rounded again at once: what caches hold."""
SUPER_BLOCK = 256
"""Inputs whose groups share a scale of their scales (K-quants of llama.cpp)."""


class GroupedWeight(msgspec.Struct, frozen=True):
    """A weight [O, I] of unsigned numbers, G groups of inputs for each output.

    values_OI: uint8, below 2 ** bits; signed ones are stored with half of the range added.
    bits: 4 or 8. group_size: inputs of a group; the last group may be shorter.
    scale_OG: float16, bfloat16 or float32; with super scales int8.
    zero_OG: uint8, what is taken off a group's values; None for half of the range (symmetric).
    minimum_OG: what is taken off the scaled values instead, float32; with super scales uint8.
    super_scale_OS, super_minimum_OS: float16, of each 256 inputs; scales and minima are times
        these (exact in float32). Both levels, or one.
    permutation_I: int32, which of a layer's inputs each column of values is for; None for its own
        (GPTQ with desc_act).
    codebook: float32 [16], what the numbers stand for; without zeros and minima.
    """

    values_OI: Tensor
    bits: int
    group_size: int
    scale_OG: Tensor
    zero_OG: Tensor | None = None
    minimum_OG: Tensor | None = None
    super_scale_OS: Tensor | None = None
    super_minimum_OS: Tensor | None = None
    permutation_I: Tensor | None = None
    codebook: Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.values_OI.shape[0]

    @property
    def in_features(self) -> int:
        return self.values_OI.shape[1]

    @property
    def nbytes(self) -> int:
        parts = (self.scale_OG, self.zero_OG, self.minimum_OG, self.super_scale_OS,
                 self.super_minimum_OS, self.permutation_I)  # fmt: skip
        values = self.values_OI.numel() * self.bits // 8
        return values + sum(part.nbytes for part in parts if part is not None)

    @property
    def float_scales(self) -> list[Tensor]:
        """Scales that a checkpoint may have NaN in."""
        parts = (self.scale_OG, self.minimum_OG, self.super_scale_OS, self.super_minimum_OS)
        return [part for part in parts if part is not None and part.is_floating_point()]

    def dequantize(self) -> Tensor:
        """float32 [O, I]; columns are the layer's inputs in their order."""
        scale_OI = self._of_inputs(self._times(self.scale_OG, self.super_scale_OS))
        if self.codebook is not None:
            weight_OI = scale_OI * self.codebook[self.values_OI.long()]
        elif self.minimum_OG is not None:
            minimum_OG = self._times(self.minimum_OG, self.super_minimum_OS)
            weight_OI = scale_OI * self.values_OI - self._of_inputs(minimum_OG)
        else:
            zero = torch.full_like(self.scale_OG, 1 << (self.bits - 1), dtype=torch.float32)
            if self.zero_OG is not None:
                zero = self.zero_OG.float()
            weight_OI = scale_OI * (self.values_OI - self._of_inputs(zero))
        if self.permutation_I is None:
            return weight_OI
        ordered_OI = torch.empty_like(weight_OI)
        ordered_OI[:, self.permutation_I.long()] = weight_OI
        return ordered_OI

    def can_join(self, other: GroupedWeight) -> bool:
        """Whether outputs of both can be those of one weight."""
        return self._kind() == other._kind() and _equal(self.permutation_I, other.permutation_I)

    def _kind(self) -> tuple[object, ...]:
        parts = (self.zero_OG, self.minimum_OG, self.super_scale_OS, self.super_minimum_OS)
        codebook = None if self.codebook is None else tuple(self.codebook.tolist())
        return (self.bits, self.group_size, self.in_features, self.scale_OG.dtype, codebook,
                *(part is None for part in parts))  # fmt: skip

    def _times(self, of_OG: Tensor, super_OS: Tensor | None) -> Tensor:
        """Scales or minima in float32, times those of their 256 inputs if there are two levels."""
        if super_OS is None:
            return of_OG.float()
        super_OG = super_OS.float().repeat_interleave(SUPER_BLOCK // self.group_size, 1)
        return of_OG.float() * super_OG[:, : of_OG.shape[1]]

    def _of_inputs(self, of_OG: Tensor) -> Tensor:
        return of_OG.repeat_interleave(self.group_size, 1)[:, : self.in_features]


class Float8Weight(msgspec.Struct, frozen=True):
    """A weight [O, I] of E4M3 numbers: w = value * scale.

    values_OI: float8_e4m3fn. scale: float32 [O, 1], or of blocks
    [ceil(O / block), ceil(I / block)]. block: 128, or what is left of it where ranks cut through.
    """

    values_OI: Tensor
    scale: Tensor
    block: int = 128

    @property
    def has_blocks(self) -> bool:
        return self.scale.shape != (self.values_OI.shape[0], 1)

    def can_join(self, other: Float8Weight) -> bool:
        """Whether outputs of the other, after these, can be those of one weight."""
        mine, theirs = self.values_OI.shape, other.values_OI.shape
        is_alike = self.has_blocks == other.has_blocks and mine[1] == theirs[1]
        is_alike = is_alike and self.block == other.block
        return is_alike and not (self.has_blocks and mine[0] % self.block)

    def dequantize(self) -> Tensor:
        return self.values_OI.float() * self._scale_of(slice(0, len(self.values_OI)))

    def in_integers(self) -> GroupedWeight:
        """Rounded to eight bits with a scale for each output, for machines without such floats.

        Takes as much memory. On the demo model the divergence from its unquantized text grows from
        0.0043 to at most 0.0048, with activations in eight bits; those in E4M3 would add 0.0055.
        """
        values_OI = torch.empty(self.values_OI.shape, dtype=torch.uint8)
        largest_O1 = torch.empty(len(values_OI), 1)
        for start in range(0, len(values_OI), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            weight_RI = _floats(self.values_OI[rows]).mul_(self._scale_of(rows))
            largest_R1 = torch.maximum(weight_RI.amax(1, keepdim=True), -weight_RI.amin(1, True))
            inverse_R1 = (127.0 / largest_R1).masked_fill_(largest_R1 == 0, 0.0)
            values_OI[rows] = weight_RI.mul_(inverse_R1).round_().add_(128.0)
            largest_O1[rows] = largest_R1
        return GroupedWeight(values_OI, 8, values_OI.shape[1], largest_O1 / 127.0)

    def _scale_of(self, rows: slice) -> Tensor:
        """Scales of some rows, for each input or for all."""
        if not self.has_blocks:
            return self.scale[rows]
        first, stop = rows.start, min(rows.stop, len(self.values_OI))
        scale_RB = self.scale[torch.arange(first, stop) // self.block]
        return scale_RB.repeat_interleave(self.block, 1)[:, : self.values_OI.shape[1]]


def _floats(values: Tensor) -> Tensor:
    """E4M3 to float32, by way of float16, whose bits are the same with a larger exponent."""
    as_bytes = values.contiguous().view(torch.int8)
    if bool(((as_bytes & 127) == 127).any()):  # not a number, which would become one
        return values.float()
    half_bits = as_bytes.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return half_bits.view(torch.float16).float().mul_(256.0)


QuantizedForm = Literal["grouped", "float8"]
"""The quantized ones of `CheckpointWeight`."""

CheckpointWeight = Tensor | GroupedWeight | Float8Weight
"""A weight as a checkpoint has it: floats, or one of the quantized forms."""


def join_adjacent(weights: list[CheckpointWeight]) -> list[CheckpointWeight]:
    """Join weights into as few as possible, with the outputs of all in their order.

    Their tensors are those of the weights where nothing is to be joined.
    """
    runs: list[list[CheckpointWeight]] = []
    for weight in weights:
        if runs and _can_join(runs[-1][-1], weight):
            runs[-1].append(weight)
        else:
            runs.append([weight])
    return [run[0] if len(run) == 1 else _joined(run) for run in runs]


def _can_join(one: CheckpointWeight, other: CheckpointWeight) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype
    return type(one) is type(other) and one.can_join(other)  # type: ignore[arg-type]


def _joined(weights: list[Any]) -> CheckpointWeight:
    if isinstance(first := weights[0], Tensor):
        if first.is_meta:  # torch.cat would import torch's compiler, which takes seconds
            num_rows = sum(len(weight) for weight in weights)
            return torch.empty((num_rows, *first.shape[1:]), dtype=first.dtype, device="meta")
        return torch.cat(weights)
    names = [name for name in _OF_OUTPUTS if getattr(first, name, None) is not None]
    return replace(
        first, **{name: torch.cat([getattr(w, name) for w in weights]) for name in names}
    )


_OF_OUTPUTS = (
    "values_OI", "scale", "scale_OG", "zero_OG", "minimum_OG", "super_scale_OS", "super_minimum_OS",
)  # fmt: skip
"""Tensors of quantized weights whose first dimension is that of outputs."""


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)
