"""Noise for the Gumbel-max trick, from a counter and not from a stream.

The noise of a token is a hash of (request seed, position, token id), so a request samples the same
tokens whatever else is in the batch, after preemption and after a restart, and a vocabulary split
over ranks needs no shared state. Counter-based generators: Salmon et al., SC 2011; the mixing steps
are splitmix64's and murmur3's finalizers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from nanocore.kernels.sampling import Noise

_CACHED_VALUES: Final = 1 << 18
"""Logits worked on at a time on a CPU, about what its cache holds with all intermediate results."""


def cached_rows(x_RV: Tensor) -> Iterator[slice]:
    """Rows to work on together: as many as a CPU's cache holds, all of them elsewhere."""
    num_rows, width = x_RV.shape
    step = max(1, _CACHED_VALUES // max(1, width)) if x_RV.is_cpu else max(1, num_rows)
    return (slice(start, start + step) for start in range(0, num_rows, step))


def best_with_noise(logits_RV: Tensor, first_token: int, noise: Noise) -> tuple[Tensor, Tensor]:
    """(the greatest value, its column) of each row with noise; see `SamplingKernels.best_token`.

    A value that is not a number is the greatest.
    """
    num_rows, width = logits_RV.shape
    token_ids_V = torch.arange(
        first_token, first_token + width, dtype=torch.int32, device=logits_RV.device
    )
    value_R = torch.empty(num_rows, device=logits_RV.device)
    column_R = torch.empty(num_rows, dtype=torch.int64, device=logits_RV.device)
    for rows in cached_rows(logits_RV):
        temperature_C1 = noise.temperature_R[rows, None]
        noisy_CV = gumbel_noise(noise.seed_R[rows], noise.position_R[rows], token_ids_V)
        noisy_CV += logits_RV[rows] / temperature_C1
        noisy_CV = torch.where(temperature_C1 == 0, logits_RV[rows], noisy_CV)
        value_R[rows], column_R[rows] = noisy_CV.max(dim=1)
    return value_R, column_R


def gumbel_noise(seed_R: Tensor, position_R: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, a pure function of (seed, position, token id).

    token_ids: integers [V], which every row has, for noise [R, V]; or [R, C], each row's own.
    """
    key_R = _mix64(_mix64(seed_R) ^ position_R)
    low_R1 = (key_R & 0xFFFFFFFF).to(torch.int32)[:, None]
    high_R1 = (key_R >> 32).to(torch.int32)[:, None]
    bits = _mix32(token_ids.to(torch.int32) * _int32(0x9E3779B9) ^ low_R1)
    bits = _mix32(bits.bitwise_xor_(high_R1))
    bits = bits.bitwise_right_shift_(1).bitwise_and_(0x7FFFFFFF)
    # Within (0, 1). Large noise comes from its small end, where a float is finest; the other end
    # must not round to 1. That gives noise from -2.9 to 22.
    uniform = bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix64(x: Tensor) -> Tensor:
    x = x + _int64(0x9E3779B97F4A7C15)
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _int64(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _int64(0x94D049BB133111EB)
    return x ^ ((x >> 31) & (2**33 - 1))


def _mix32(x: Tensor) -> Tensor:
    # In place where it can be: this runs over whole vocabularies, and memory is what it waits for.
    x = (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x).mul_(_int32(0x85EBCA6B))
    x = (x >> 13).bitwise_and_(0x7FFFF).bitwise_xor_(x).mul_(_int32(0xC2B2AE35))
    return (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x)


def _int32(value: int) -> int:
    # torch has no unsigned multiplication.
    return value - 2**32 if value >= 2**31 else value


def _int64(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
