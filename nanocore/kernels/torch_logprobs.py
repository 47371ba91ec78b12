"""Log probabilities of tokens and of the most likely ones of their rows; the reference.

Tokens are ordered as candidates, of which no two are equal: torch.topk promises nothing about ties.
Shape suffixes: see `interface`; further, C candidates of a row.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from nanocore.kernels.candidates import logits_of, make_candidates, token_ids_of
from nanocore.kernels.token_logprobs import Logprobs

_MAX_VALUES: Final = 1 << 23
"""Logits that are ordered at once, which takes 16 bytes for each."""


def logprobs(logits_RV: Tensor, token_ids_R: Tensor, num_top: int) -> Logprobs:
    """See `interface.Kernels.logprobs`."""
    num_rows, width = logits_RV.shape
    size = max(1, _MAX_VALUES // width)
    parts = [
        _of_few(logits_RV[start : start + size], token_ids_R[start : start + size], num_top)
        for start in range(0, max(1, num_rows), size)
    ]
    if len(parts) == 1:
        return Logprobs(*parts[0])
    return Logprobs(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _of_few(logits_RV: Tensor, token_ids_R: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """The fields of `Logprobs`."""
    width = logits_RV.shape[1]
    best_R1 = logits_RV.amax(dim=1, keepdim=True)
    log_sum_R1 = (logits_RV - best_R1).exp_().sum(dim=1, keepdim=True, dtype=torch.float64).log_()
    all_RV = make_candidates(logits_RV, torch.arange(width, device=logits_RV.device))
    own_R1 = all_RV.gather(1, token_ids_R.clamp(min=0)[:, None])
    rank_R = (all_RV > own_R1).sum(dim=1).add_(1).int()
    if num_top < width:
        top_RK = all_RV.topk(num_top, dim=1).values
    else:
        top_RK = all_RV.sort(dim=1, descending=True).values
    chosen_RC = torch.cat((own_R1, top_RK), dim=1)
    # The best one's distance is 0 and its logarithm alone is left, whose digits are all kept so.
    logprobs_RC = logits_of(chosen_RC).double().sub_(best_R1).sub_(log_sum_R1).float()
    return token_ids_of(chosen_RC).int(), logprobs_RC, rank_R
