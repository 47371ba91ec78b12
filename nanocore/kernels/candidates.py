"""Tokens with their logits as single integers, so that one comparison orders both.

A candidate is an int64 that is greater for a greater logit, and of equal logits for the smaller
token id. No two tokens of a row are equal, so the best ones of a row are the same however its
vocabulary is split, and a maximum or a sort needs no rule for ties. NaN is above all others.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

MAX_TOKEN_ID: Final = 0x7FFFFFFF


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
