"""Floats to groups of integers: `--quantization int4` and `int8`, as the native kernels have them.

Four bits have a scale and a minimum for each group, in two levels as llama.cpp's Q4_K: numbers of
eight bits times a float16 of each 256 inputs. Some ranges are tried for a group's numbers; for
each, scale and minimum are those of the least squared error. Eight bits are symmetric, with a
float16 scale for each group. The native kernels find the same to the bit (cpu/packing.h).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from nanocore.kernels.grouped_weight import SUPER_BLOCK, GroupedWeight

GROUP_SIZE: Final = 32
_RANGES: Final = [13.5 + 0.25 * candidate for candidate in range(10)]
"""How many numbers a group's range is divided into, of which 16 are used."""
_SUPER_SCALE, _SUPER_MINIMUM = 120.0, 240.0  # below the largest: float16 may round down
LARGEST: Final = 100 * 65504.0
"""The largest magnitude whose scales are finite, with four bits and with eight."""
SMALLEST: Final = 2.0**-12
"""The least that a weight's largest magnitude may be, so that scales are not rounded to zero."""
_VALUES_AT_ONCE: Final = 1 << 24
"""Limits the memory of the few copies in float32 that exist meanwhile."""


def packed_bytes(out_features: int, in_features: int) -> int:
    """Bytes of a weight of four bits with its scales and minima."""
    num_groups, num_supers = -(-in_features // GROUP_SIZE), -(-in_features // SUPER_BLOCK)
    return out_features * (-(-in_features // 2) + 2 * num_groups + 4 * num_supers)


def quantize_groups(weight_OI: Tensor) -> GroupedWeight:
    """The weight in four bits; a scale is NaN if one of its 256 inputs is not finite."""
    in_features = weight_OI.shape[1]
    rows = max(1, _VALUES_AT_ONCE // max(1, in_features))
    parts = [_quantize(part_OI) for part_OI in weight_OI.split(rows)]
    values_OI, *others = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    scale_OG, minimum_OG, super_scale_OS, super_minimum_OS = others
    return GroupedWeight(
        values_OI[:, :in_features].contiguous(), 4, GROUP_SIZE, scale_OG, minimum_OG=minimum_OG,
        super_scale_OS=super_scale_OS, super_minimum_OS=super_minimum_OS,
    )  # fmt: skip


def quantize_eight_bits(weight_OI: Tensor) -> GroupedWeight:
    """The weight in eight bits; a scale is NaN if an input of its group is not finite."""
    x_IOG = _by_group(weight_OI)
    largest_OG = x_IOG.abs().amax(0)
    largest_OG = largest_OG.masked_fill(~x_IOG.isfinite().all(0), torch.nan)
    scale_OG = (largest_OG / torch.full_like(largest_OG, 127.0)).half()
    inverse_OG = _inverse(scale_OG.float())
    q_IOG = (x_IOG * inverse_OG).nan_to_num(0.0).clamp(-127, 127).round() + 128
    values_OI = q_IOG.to(torch.uint8).permute(1, 2, 0).flatten(1)[:, : weight_OI.shape[1]]
    return GroupedWeight(values_OI.contiguous(), 8, GROUP_SIZE, scale_OG)


def _by_group(weight_OI: Tensor) -> Tensor:
    """float32 [I of a group, O, G], of which the last group is filled up with zeros."""
    in_features = weight_OI.shape[1]
    num_groups = -(-in_features // GROUP_SIZE)
    x_OI = torch.nn.functional.pad(weight_OI.float(), (0, num_groups * GROUP_SIZE - in_features))
    return x_OI.unflatten(1, (num_groups, GROUP_SIZE)).permute(2, 0, 1).contiguous()


def _quantize(weight_OI: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(values with their padding, scales, minima, super scales, super minima) of some outputs."""
    x_IOG = _by_group(weight_OI)
    num_groups = x_IOG.shape[2]
    scale_OG, minimum_OG = _fit(x_IOG)
    is_finite_OG = x_IOG.isfinite().all(0)
    super_scale_OS = _super_scale(scale_OG.masked_fill(~is_finite_OG, torch.nan), _SUPER_SCALE)
    super_minimum_OS = _super_scale(minimum_OG.masked_fill(~is_finite_OG, 0.0), _SUPER_MINIMUM)

    def numbers(of_OG: Tensor, super_OS: Tensor, most: int) -> tuple[Tensor, Tensor]:
        super_OG = super_OS.float().repeat_interleave(SUPER_BLOCK // GROUP_SIZE, 1)[:, :num_groups]
        number_OG = (of_OG / super_OG).nan_to_num(0.0).round().clamp(0, most)
        number_OG = number_OG.masked_fill(~(super_OG > 0), 0.0)
        return number_OG, number_OG * super_OG

    scale_numbers_OG, scale_OG = numbers(scale_OG, super_scale_OS, 127)
    minimum_numbers_OG, minimum_OG = numbers(minimum_OG, super_minimum_OS, 255)
    q_IOG = ((x_IOG + minimum_OG) * _inverse(scale_OG)).nan_to_num(0.0).clamp(0, 15).round()
    values_OI = q_IOG.to(torch.uint8).permute(1, 2, 0).flatten(1)
    numbers_OG = scale_numbers_OG.to(torch.int8), minimum_numbers_OG.to(torch.uint8)
    return values_OI, *numbers_OG, super_scale_OS, super_minimum_OS


def _fit(x_IOG: Tensor) -> tuple[Tensor, Tensor]:
    """(scales, minima) [O, G] of the least squared error, x ~ scale q - minimum."""
    low_OG, high_OG, sum_OG = x_IOG.amin(0).clamp(max=0), x_IOG.amax(0), _sum(x_IOG)
    range_OG, count = high_OG - low_OG, float(x_IOG.shape[0])
    most_OG, scale_OG, minimum_OG = torch.zeros_like(low_OG), torch.zeros_like(low_OG), -low_OG
    for width in _RANGES:
        inverse_OG = torch.full_like(range_OG, width) / range_OG
        q_IOG = ((x_IOG - low_OG) * inverse_OG).nan_to_num(0.0, 15.0, 0.0).clamp(0, 15).round()
        numbers_OG, squares_OG = _sum(q_IOG), _sum(q_IOG.square())
        products_OG = _sum(x_IOG * q_IOG)
        divisor_OG = count * squares_OG - numbers_OG * numbers_OG
        slope_OG = (count * products_OG - sum_OG * numbers_OG) / divisor_OG
        offset_OG = (squares_OG * sum_OG - numbers_OG * products_OG) / divisor_OG
        slope_OG = torch.where(offset_OG > 0, products_OG / squares_OG, slope_OG)
        offset_OG = torch.where(offset_OG > 0, 0.0, offset_OG)
        linear_OG = slope_OG * products_OG + offset_OG * sum_OG
        # How much of the squares is not an error.
        gain_OG = (
            linear_OG + linear_OG
            - slope_OG * (slope_OG * squares_OG + (offset_OG + offset_OG) * numbers_OG)
            - offset_OG * offset_OG * count
        )  # fmt: skip
        is_better_OG = (gain_OG > most_OG) & (slope_OG > 0)
        most_OG = torch.where(is_better_OG, gain_OG, most_OG)
        scale_OG = torch.where(is_better_OG, slope_OG, scale_OG)
        minimum_OG = torch.where(is_better_OG, -offset_OG, minimum_OG)
    return scale_OG, minimum_OG


def _super_scale(of_OG: Tensor, most: float) -> Tensor:
    """float16 [O, S]: numbers up to `most` times it are those of a super-block's groups."""
    per = SUPER_BLOCK // GROUP_SIZE
    padded_OG = torch.nn.functional.pad(of_OG, (0, -of_OG.shape[1] % per))
    largest_OS = padded_OG.unflatten(1, (-1, per)).amax(2)
    return (largest_OS / torch.full_like(largest_OS, most)).half()


def _inverse(scale_OG: Tensor) -> Tensor:
    return torch.where(scale_OG > 0, torch.ones_like(scale_OG) / scale_OG, 0.0)


def _sum(x_IOG: Tensor) -> Tensor:
    # In the order of I, so that the native kernels find the same scales to the bit.
    total_OG = x_IOG[0].clone()
    for x_OG in x_IOG[1:]:
        total_OG += x_OG
    return total_OG
