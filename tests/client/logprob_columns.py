"""Log probabilities as an engine sends them."""

from __future__ import annotations

from array import array
from typing import TypeAlias

from nanocore.protocol.codec import pack_int32, pack_uint32
from nanocore.protocol.messages import TokenLogprobs

Told: TypeAlias = tuple[int, int, list[tuple[int, float]]]
"""(handle, the token's own rank, candidates: (token id, logprob), the token itself first)."""


def logprobs_of(*told: Told) -> TokenLogprobs:
    candidates = [candidate for _, _, candidates in told for candidate in candidates]
    return TokenLogprobs(
        handles=pack_uint32([handle for handle, _, _ in told]),
        ranks=pack_uint32([rank for _, rank, _ in told]),
        counts=pack_uint32([len(candidates) for _, _, candidates in told]),
        token_ids=pack_int32([token_id for token_id, _ in candidates]),
        logprobs=array("f", [logprob for _, logprob in candidates]).tobytes(),
    )
