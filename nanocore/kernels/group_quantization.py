"""Floats to symmetric groups of four bits, for backends that have no kernel of their own for it.

Sixteen scales are tried for each group, by which its largest magnitude becomes -5.6 to -8.6; that
of the least squared error is kept, as a float16, and values are rounded with it. The native kernels
do the same (cpu/packing.h). (The largest at the end of the range: llama.cpp's Q4_0.)
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from nanocore.kernels.grouped_weight import GroupedWeight

GROUP_SIZE: Final = 32
_ENDS: Final = [float(end) for end in torch.tensor(-0.2) * torch.arange(28, 44)]
MAX_INT4: Final = 5.6 * 65504
"""The largest magnitude whose scale is a finite float16, whichever of _ENDS is chosen."""
_VALUES_AT_ONCE: Final = 1 << 24
"""Limits the memory of the few copies in float32 that exist meanwhile."""


def packed_bytes(out_features: int, in_features: int, group_size: int = GROUP_SIZE) -> int:
    """Bytes of such a weight: half a byte for each value, and two for each scale."""
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
    x_IOG = x_OGI.unflatten(1, (num_groups, group_size)).permute(2, 0, 1).contiguous()
    extreme_OG = x_IOG.gather(0, x_IOG.abs().argmax(0, keepdim=True))[0]
    is_finite_OG = x_IOG.isfinite().all(0)
    most_OG, scale_OG = torch.zeros_like(extreme_OG), torch.zeros_like(extreme_OG)
    for end in _ENDS:
        # The range has one number more for the sign of the largest one.
        q_IOG = _number(x_IOG * (end / extreme_OG))
        products_OG, squares_OG = _sum(x_IOG * q_IOG), _sum(q_IOG.square())
        tried_OG = extreme_OG / end
        # How much of the squares is not an error.
        gain_OG = tried_OG * (2 * products_OG - tried_OG * squares_OG)
        is_better_OG = (gain_OG > most_OG) & is_finite_OG
        most_OG = torch.where(is_better_OG, gain_OG, most_OG)
        scale_OG = torch.where(is_better_OG, tried_OG, scale_OG)
    scale_OG = scale_OG.masked_fill(~is_finite_OG, torch.nan).half()
    inverse_OG = (1 / scale_OG.float()).nan_to_num(0.0, 0.0, 0.0)
    q_IOG = _number((x_IOG * inverse_OG).nan_to_num(0.0)) + 8
    return q_IOG.to(torch.uint8).permute(1, 2, 0).flatten(1), scale_OG


def _sum(x_IOG: Tensor) -> Tensor:
    # In the order of I, so that the native kernels find the same scales to the bit.
    total_OG = x_IOG[0].clone()
    for x_OG in x_IOG[1:]:
        total_OG += x_OG
    return total_OG


def _number(scaled: Tensor) -> Tensor:
    return scaled.round().clamp(-8, 7)
