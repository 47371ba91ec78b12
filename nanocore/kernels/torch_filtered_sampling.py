"""Which tokens top_k, top_p and min_p leave, by a sort of the whole row; the reference.

The rules are those of `interface.Filters`. Weights are float32 and their sums float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanocore.kernels.gumbel_noise import cached_rows
from nanocore.kernels.interface import Filters, Noise


def filtered(logits_RV: Tensor, noise: Noise, filters: Filters) -> Tensor:
    """The logits of tokens that stay, and minus infinity in place of the others', [R, V].

    A row's NaN stays, if there is one.
    """
    filtered_RV = torch.empty_like(logits_RV)
    for rows in cached_rows(logits_RV):
        # 0.0 and -0.0 are equal, which a sort by bits would not see.
        scaled_CV = logits_RV[rows] / noise.temperature_R[rows, None] + 0.0
        order_CV, num_kept_C = _order(scaled_CV, filters.of_rows(rows))
        ranks_V = torch.arange(order_CV.shape[1], device=order_CV.device)
        is_dropped_CV = torch.empty_like(order_CV, dtype=torch.bool)
        is_dropped_CV.scatter_(1, order_CV, ranks_V >= num_kept_C[:, None])
        filtered_RV[rows] = logits_RV[rows].masked_fill(is_dropped_CV, -torch.inf)
    return filtered_RV


def _order(scaled_RV: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """(columns from the best on, [R, V]; how many of the first stay, [R])."""
    sorted_RV, order_RV = scaled_RV.sort(dim=1, descending=True, stable=True)
    best_R1 = sorted_RV[:, :1]
    gaps_RV = (best_R1 - sorted_RV).masked_fill_(sorted_RV == best_R1, 0.0)  # inf - inf is NaN
    ranks_V = torch.arange(scaled_RV.shape[1], device=scaled_RV.device)
    allowed_RV = gaps_RV <= -filters.min_p_R.log()[:, None]
    allowed_RV &= ranks_V < filters.top_k_R[:, None]
    sums_RV = (gaps_RV.neg().exp_() * allowed_RV).cumsum(dim=1, dtype=torch.float64)
    limit_R = filters.top_p_R * sums_RV[:, -1]
    limit_R = torch.where(filters.top_p_R < 1.0, limit_R, torch.inf)
    num_below_R = torch.searchsorted(sums_RV, limit_R[:, None])[:, 0]
    return order_RV, torch.minimum(allowed_RV.sum(dim=1), 1 + num_below_R).clamp_(min=1)
