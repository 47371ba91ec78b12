"""E4M3 without torch's conversions: all its numbers, and the nearest of them."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.tensor(
    [unit * 2.0**-9 for unit in range(8)]
    + [(8 + unit) * 2.0 ** (power - 3) for power in range(-6, 9) for unit in range(8)][:-1],
    dtype=torch.float64,
)
"""All that are not negative, in order, from 0 to 448."""


def rounded(x: Tensor) -> Tensor:
    """Rows of x as E4M3 numbers times a scale of their row can have them; float64."""
    scale = x.abs().amax(dim=1, keepdim=True).float() / 448.0
    y = x.float() / scale
    between = (E4M3[1:] + E4M3[:-1]).float() / 2
    nearest = torch.searchsorted(between, y.abs())
    is_tie = between[nearest.clamp(max=len(between) - 1)] == y.abs()
    nearest += (is_tie & (nearest % 2 == 1)).long()  # to the even one
    return E4M3[nearest] * y.sign().double() * scale.double()
