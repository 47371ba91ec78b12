"""Rotary position embeddings (RoPE: Su et al. 2021), as a model's configuration describes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "ntk", "dynamic", "yarn", "longrope", "llama3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions turn into angles.

    rotary_dim: how many of a head's leading values rotate; even.
    theta: the base of the frequencies.
    factor: how far the context is stretched.
    original_max_position_embeddings: the length before stretching.
    low_freq_factor, high_freq_factor: llama3's band, in rotations over the original length.
    beta_fast, beta_slow: YaRN's band, likewise; truncate: widen it to whole dimensions.
    short_factor, long_factor: LongRoPE's, how far each pair of values is stretched, by whether no
    more than the original length is served.
    attention_factor, mscale, mscale_all_dim: the scale of cos and sin of YaRN and LongRoPE, or what
    it follows from; None and 0 are absent.
    """

    kind: RopeKind = "default"
    rotary_dim: int
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
