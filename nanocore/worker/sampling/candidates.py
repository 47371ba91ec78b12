"""Candidates (see `nanocore.kernels.candidates`) as what ranks send each other when they sample.

One whose logit is not finite stands for no token: a row that has it for its best has none. NaN is
above all others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanocore.kernels.candidates import MAX_TOKEN_ID, logits_of, make_candidates, token_ids_of
from nanocore.kernels.interface import Kernels, Noise
from nanocore.kernels.token_mask import TokenMask
from nanocore.kernels.torch_backend import NO_TOKEN


def nan_candidates(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Candidates above every token: they stand for rows with a NaN, which get none."""
    return make_candidates(
        torch.full(shape, torch.nan, device=device),
        torch.zeros(shape, dtype=torch.int64, device=device),
    )


def no_candidates(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Fillers that come after every token, of minus infinity; their token id is 2**31 - 1."""
    return make_candidates(
        torch.full(shape, -torch.inf, device=device),
        torch.full(shape, MAX_TOKEN_ID, dtype=torch.int64, device=device),
    )


def sampled_token_ids(chosen_R: Tensor) -> Tensor:
    """Token ids of the chosen candidates, NO_TOKEN where they stand for none; int64 [R]."""
    return token_ids_of(chosen_R).masked_fill_(~logits_of(chosen_R).isfinite(), NO_TOKEN)


def best_candidate(
    logits_RV: Tensor,
    first_token: int,
    kernels: Kernels,
    noise: Noise | None = None,
    mask: TokenMask | None = None,
) -> Tensor:
    """The best of each row's columns, which are tokens from first_token on, by the mask; [R]."""
    if logits_RV.shape[1] == 0:
        return no_candidates((len(logits_RV),), logits_RV.device)
    value_R, column_R = kernels.best_token(logits_RV, first_token, noise, mask=mask)
    best_R = make_candidates(value_R, column_R + first_token)
    return torch.where(value_R.isnan(), nan_candidates((), value_R.device), best_R)
