"""Floats to symmetric groups of four bits, for backends that have no kernel of their own for it.

Sixteen scales are tried for each group, which bring its largest magnitude near the end of the
range, each bettered by least squares; that of the least squared error is kept, and values are
rounded anew. The native kernels do the same (cpu/packing.h). (Scales by search: llama.cpp's Q4_0.)
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from nanocore.kernels.grouped_weight import GroupedWeight

GROUP_SIZE: Final = 32
_CANDIDATES: Final = 16
_VALUES_AT_ONCE: Final = 1 << 24
"""Of which there are a few copies in float32 meanwhile."""


def packed_bytes(out_features: int, in_features: int, group_size: int = GROUP_SIZE) -> int:
    """What such a weight takes: half a byte for each value, and two for each scale."""
    return out_features * (-(-in_features // 2) + 2 * -(-in_features // group_size))


def quantize_groups(weight_OI: Tensor, group_size: int = GROUP_SIZE) -> GroupedWeight:
    """The weight in four bits, with float16 scales; of what is not finite the scale is NaN."""
    in_features = weight_OI.shape[1]
    num_groups = -(-in_features // group_size)
    rows = max(1, _VALUES_AT_ONCE // max(1, in_features))
    parts = [
        _quantize(part_OI, num_groups, group_size) for part_OI in weight_OI.split(rows)
    ]  # fmt: skip
    values_OI, scale_OG = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return GroupedWeight(values_OI[:, :in_features].contiguous(), 4, group_size, scale_OG)


def _quantize(weight_OI: Tensor, num_groups: int, group_size: int) -> tuple[Tensor, Tensor]:
    """(values with their padding, scales) of some outputs."""
    missing = num_groups * group_size - weight_OI.shape[1]
    x_OGI = torch.nn.functional.pad(weight_OI.float(), (0, missing))
    x_OGI = x_OGI.unflatten(1, (num_groups, group_size))
    place_OG1 = x_OGI.abs().argmax(2, keepdim=True)
    extreme_OG1 = x_OGI.gather(2, place_OG1)
    is_finite_OG1 = x_OGI.isfinite().all(2, keepdim=True)
    most_OG1 = torch.zeros_like(extreme_OG1)
    scale_OG1 = torch.zeros_like(extreme_OG1)
    for candidate in range(_CANDIDATES):
        # The range has one number more for the sign of the largest one.
        q_OGI = _number(x_OGI * (-(7.2 + 0.1 * candidate) / extreme_OG1))
        products_OG1 = (x_OGI * q_OGI).sum(2, keepdim=True)
        squares_OG1 = q_OGI.square().sum(2, keepdim=True)
        gain_OG1 = products_OG1.square() / squares_OG1  # how much of the squares is not an error
        is_better_OG1 = (gain_OG1 > most_OG1) & is_finite_OG1
        most_OG1 = torch.where(is_better_OG1, gain_OG1, most_OG1)
        scale_OG1 = torch.where(is_better_OG1, products_OG1 / squares_OG1, scale_OG1)
    scale_OG1 = scale_OG1.masked_fill(~is_finite_OG1, torch.nan).half()
    inverse_OG1 = (1 / scale_OG1.float()).nan_to_num(0.0, 0.0, 0.0)
    q_OGI = _number((x_OGI * inverse_OG1).nan_to_num(0.0)) + 8
    return q_OGI.to(torch.uint8).flatten(1), scale_OG1[..., 0]


def _number(scaled: Tensor) -> Tensor:
    return scaled.round().clamp(-8, 7)
