"""Rotary position embeddings (RoPE: Su et al. 2021) and the ways of stretching them.

Frequencies are computed in float32 in transformers' order of operations, so that both agree to the
bit. Keys are cached rotated, so a position's rotation never changes while an engine runs. Dynamic
NTK and LongRoPE, which transformers recomputes as a sequence grows, are therefore fixed by the
served length, as in vLLM: up to the model's original length, which is served by default, every
sequence is rotated as transformers does a short one; beyond, as one of exactly the served length.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanocore.kernels.attention import Rotary
from nanocore.worker.config.rope_config import RopeConfig


def rotary_table(
    config: RopeConfig | None, max_len: int, dtype: torch.dtype, device: torch.device
) -> Rotary:
    """cos and sin of every position below max_len, in dtype; they are computed in float32.

    config: None turns the two dimensions that kernels turn at least by nothing, which changes no
    bit. max_len: the served length (dynamic NTK and LongRoPE depend on it).
    """
    if config is None:
        still = torch.zeros(max_len, 1, dtype=dtype, device=device)
        return Rotary(still.cos(), still)
    positions = torch.arange(max_len, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(config, max_len))
    scale = attention_scaling(config)
    return Rotary(
        (angles.cos() * scale).to(device, dtype), (angles.sin() * scale).to(device, dtype)
    )


def inverse_frequencies(config: RopeConfig, max_len: int) -> Tensor:
    """Radians per position, float32 [rotary_dim / 2], when max_len positions are served."""
    original = config.original_max_position_embeddings
    if config.kind == "dynamic":
        # The base for max_len positions (NTK-aware scaling; bloc97 and emozilla, 2023).
        stretch = config.factor * max(max_len, original) / original - (config.factor - 1)
        dim = config.rotary_dim
        return 1.0 / _periods(config, config.theta * stretch ** (dim / (dim - 2)))
    if config.kind == "ntk":
        # The last pair slowed by the factor, those before it by less (fixed NTK: Su 2023).
        frequencies = 1.0 / _periods(config, config.theta * config.factor)
        return frequencies / config.factor ** (2 / config.rotary_dim)
    periods = _periods(config, config.theta)
    if config.kind == "linear":
        return 1.0 / periods / config.factor
    if config.kind == "yarn":
        return _yarn(config, periods)
    if config.kind == "longrope":
        # Each pair is stretched by what a search has found (LongRoPE: Ding et al. 2024).
        factors = config.long_factor if max_len > original else config.short_factor
        return 1.0 / (torch.tensor(factors) * periods)
    if config.kind == "llama3":
        return _llama3(config, 1.0 / periods)
    return 1.0 / periods


def attention_scaling(config: RopeConfig) -> float:
    """Factor of cos and sin: the attention's temperature in YaRN and LongRoPE."""
    if config.kind not in ("yarn", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.kind == "longrope":
        length = config.original_max_position_embeddings
        return math.sqrt(1 + math.log(config.factor) / math.log(length))
    if config.mscale and config.mscale_all_dim:
        return _yarn_mscale(config, config.mscale) / _yarn_mscale(config, config.mscale_all_dim)
    return _yarn_mscale(config, 1.0)


def _yarn_mscale(config: RopeConfig, weight: float) -> float:
    return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0


def _periods(config: RopeConfig, theta: float) -> Tensor:
    """Positions per radian, float32 [rotary_dim / 2]."""
    dims = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32)
    return theta ** (dims / config.rotary_dim)


def _yarn(config: RopeConfig, periods: Tensor) -> Tensor:
    """Fast dimensions as trained, slow ones stretched, a ramp between (Peng et al. 2023)."""

    def dimension(rotations: float) -> float:
        """The dimension, as a fraction, that rotates this often over the original length."""
        length = config.original_max_position_embeddings
        log_period = math.log(length / (rotations * 2 * math.pi))
        return config.rotary_dim * log_period / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    dims = torch.arange(config.rotary_dim // 2, dtype=torch.float32)
    keep = 1 - ((dims - low) / (high - low)).clamp(0, 1)
    return 1.0 / (config.factor * periods) * (1 - keep) + 1.0 / periods * keep


def _llama3(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Slow dimensions stretched, fast ones as trained, blended between (Llama 3.1, 2024)."""
    length = config.original_max_position_embeddings
    low, high = config.low_freq_factor, config.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    blend = (length / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / config.factor + blend * frequencies
    slow, fast = wavelengths > length / low, wavelengths < length / high
    return torch.where(slow, frequencies / config.factor, torch.where(fast, frequencies, blended))
