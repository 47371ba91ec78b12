"""Reference sampling: the Gumbel-max trick with noise from a counter, not from a stream.

The noise of a token is a hash of (request seed, position, token id), so a request samples the same
tokens whatever else is in the batch, after preemption and after a restart, and a vocabulary split
over ranks needs no shared state. Counter-based generators: Salmon et al., SC 2011; the mixing steps
are splitmix64's and murmur3's finalizers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nanocore.kernels.backend import SamplingMetadata


def sample(logits_RV: Tensor, metadata: SamplingMetadata) -> Tensor:
    """One token id per row, int64 [R]. Greedy rows take the first of the largest logits."""
    token_ids_R = logits_RV.argmax(dim=-1)
    if metadata.all_greedy:
        return token_ids_R
    scaled_RV = logits_RV / torch.where(metadata.greedy_R, 1.0, metadata.temperature_R)[:, None]
    if metadata.filters:
        scaled_RV = filter_logits(scaled_RV, metadata.top_k_R, metadata.top_p_R, metadata.min_p_R)
    noise_RV = gumbel_noise(metadata.seed_R, metadata.position_R, logits_RV.shape[1])
    return torch.where(metadata.greedy_R, token_ids_R, (scaled_RV + noise_RV).argmax(dim=-1))


def filter_logits(logits_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor, min_p_R: Tensor) -> Tensor:
    """Logits with the tokens that min_p, top_k and top_p exclude at minus infinity, in that order.

    The most likely token always stays. Tokens of equal logits are kept in the order of their ids.
    """
    probs_RV = logits_RV.softmax(dim=-1)
    floor_R1 = min_p_R[:, None] * probs_RV.amax(dim=-1, keepdim=True)
    logits_RV = logits_RV.masked_fill(probs_RV < floor_R1, -torch.inf)

    sorted_RV, order_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    drop_RV = ranks_V >= top_k_R[:, None]
    kept_probs_RV = sorted_RV.masked_fill(drop_RV, -torch.inf).softmax(dim=-1)
    before_RV = kept_probs_RV.cumsum(dim=-1) - kept_probs_RV
    drop_RV |= before_RV >= top_p_R[:, None]
    drop_RV[:, 0] = False
    return logits_RV.masked_fill(
        torch.empty_like(drop_RV).scatter_(1, order_RV, drop_RV), -torch.inf
    )


def gumbel_noise(seed_R: Tensor, position_R: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, float32 [R, V], a pure function of (seed, position, token id)."""
    key_R = _mix64(_mix64(seed_R) ^ position_R)
    low_R1 = (key_R & 0xFFFFFFFF).to(torch.int32)[:, None]
    high_R1 = (key_R >> 32).to(torch.int32)[:, None]
    token_V = torch.arange(vocab_size, dtype=torch.int32, device=seed_R.device)
    bits_RV = _mix32(token_V * _int32(0x9E3779B9) ^ low_R1)
    bits_RV = _mix32(bits_RV ^ high_R1)
    # 24 random bits, centred, so that the uniform is never 0 or 1.
    uniform_RV = (((bits_RV >> 8) & 0xFFFFFF).float() + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform_RV))


def _mix64(x: Tensor) -> Tensor:
    x = x + _int64(0x9E3779B97F4A7C15)
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _int64(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _int64(0x94D049BB133111EB)
    return x ^ ((x >> 31) & (2**33 - 1))


def _mix32(x: Tensor) -> Tensor:
    x = (x ^ ((x >> 16) & 0xFFFF)) * _int32(0x85EBCA6B)
    x = (x ^ ((x >> 13) & 0x7FFFF)) * _int32(0xC2B2AE35)
    return x ^ ((x >> 16) & 0xFFFF)


def _int32(value: int) -> int:
    """The signed integer with these 32 bits: torch has no unsigned multiplication."""
    return value - 2**32 if value >= 2**31 else value


def _int64(value: int) -> int:
    """The signed integer with these 64 bits."""
    return value - 2**64 if value >= 2**63 else value
