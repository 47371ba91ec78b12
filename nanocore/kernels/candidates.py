"""Tokens with their logits as single integers, so that one comparison orders both.

A candidate is an int64 that is greater for a greater logit, and of equal logits for the smaller
token id. No two tokens of a row are equal, so the best ones of a row are the same however its
vocabulary is split, and a maximum or a sort needs no rule for ties. NaN is above all others.

A candidate whose logit is not finite stands for no token: a row that has it for its best has none.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from nanocore.kernels.logit_edits import TokenMask
from nanocore.kernels.sampling import Noise, SamplingKernels

MAX_TOKEN_ID: Final = 0x7FFFFFFF
NO_TOKEN: Final = -1
"""Token id of a row that has none: its best logit is not finite, or one is NaN."""


def make_candidates(logits: Tensor, token_ids: Tensor) -> Tensor:
    """int64 of the shape that logits (float32) and token_ids (below 2**31) broadcast to."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 equals 0.0: adding makes it that
    # Floats of one sign are ordered as their bits are; the negative ones backwards.
    ordered = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)
    return ordered.long().bitwise_left_shift_(32) | (MAX_TOKEN_ID - token_ids)


def logits_of(candidates: Tensor) -> Tensor:
    """The logits in them, float32, of the same shape."""
    ordered = (candidates >> 32).to(torch.int32)
    return (ordered ^ (ordered >> 31).bitwise_and_(0x7FFFFFFF)).view(torch.float32)


def token_ids_of(candidates: Tensor) -> Tensor:
    """The token ids in them, int64, of the same shape."""
    return MAX_TOKEN_ID - (candidates & 0xFFFFFFFF)


def sampled_token_ids(chosen_R: Tensor) -> Tensor:
    """Token ids of the chosen candidates, NO_TOKEN where they stand for none; int64 [R]."""
    return token_ids_of(chosen_R).masked_fill_(~logits_of(chosen_R).isfinite(), NO_TOKEN)


def best_candidate(
    logits_RV: Tensor,
    first_token: int,
    kernels: SamplingKernels,
    noise: Noise | None = None,
    mask: TokenMask | None = None,
) -> Tensor:
    """The best of each row's columns, which are tokens from first_token on, by the mask; [R]."""
    if logits_RV.shape[1] == 0:  # what comes after every token
        lowest_R = torch.full((len(logits_RV),), -torch.inf, device=logits_RV.device)
        return make_candidates(lowest_R, torch.full_like(lowest_R, MAX_TOKEN_ID, dtype=torch.int64))
    value_R, column_R = kernels.best_token(logits_RV, first_token, noise, mask=mask)
    best_R = make_candidates(value_R, column_R + first_token)
    # A row with a NaN has what is above every token: it gets none.
    above_R = make_candidates(torch.full_like(value_R, torch.nan), torch.zeros_like(column_R))
    return torch.where(value_R.isnan(), above_R, best_R)
