"""Quantized KV caches: what is stored for a token's K or V, and what it costs.

Each token and KV head has a scale of its own, so that a token is written once, alone and for good,
whatever comes after it (KIVI: Liu et al. 2024 has scales per channel for K, which needs groups of
tokens). int8 is symmetric. A scale is rounded to bfloat16 before values are quantized with it, so
its eight bits cost no accuracy, its range needs no care, int8 * scale is rounded once in bfloat16,
and a token is stored as the same numbers wherever a cache lives. How many bytes hold a scale is
another matter: `scale_dtype`.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor


class KVCacheFormat(msgspec.Struct, frozen=True):
    """Storage format of K and V. scale_dtype: None for values that are stored as they are."""

    dtype: torch.dtype
    scale_dtype: torch.dtype | None = None

    def bytes_per_head(self, head_dim: int) -> int:
        """Bytes of one token's K, or of its V, in one KV head of one layer."""
        scale = self.scale_dtype.itemsize if self.scale_dtype else 0
        return head_dim * self.dtype.itemsize + scale


QUANTIZED_KV_CACHES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""By the name that users give. fp8 is e4m3: 3 bits of mantissa (Micikevicius et al. 2022)."""

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def scale_dtype(device_type: str) -> torch.dtype:
    """Dtype of the scales of a quantized cache on such a device.

    A GPU copies four bytes and more to shared memory while it computes; for two it would wait. A
    CPU has no such limit, and bfloat16 takes half the room.
    """
    return torch.float32 if device_type == "cuda" else torch.bfloat16


def kv_cache_format(name: str, model_dtype: torch.dtype, device_type: str = "cpu") -> KVCacheFormat:
    """The format of this name; "auto" keeps values in the model's dtype.

    Raises ValueError: no such format.
    """
    if name == "auto":
        return KVCacheFormat(model_dtype)
    if name not in QUANTIZED_KV_CACHES:
        names = ", ".join(("auto", *QUANTIZED_KV_CACHES))
        raise ValueError(f"unknown KV cache dtype {name!r}; known: {names}")
    return KVCacheFormat(QUANTIZED_KV_CACHES[name], scale_dtype(device_type))


def quantize(x: Tensor, dtype: torch.dtype, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values of `dtype`, [..., D], and their scales, [...]: x ~ value * scale.

    The largest magnitude of the last dimension becomes the largest of `dtype`. scale_dtype: what
    scales, which are numbers of bfloat16, are returned in.
    """
    largest = _LARGEST[dtype]
    amax = x.abs().amax(-1).float()
    # Zeros need a scale too; the smallest one will do.
    scale = (amax / largest).bfloat16().clamp(min=torch.finfo(torch.bfloat16).tiny)
    scaled = x.float() / scale.float()[..., None]
    if dtype == torch.int8:
        scaled.round_()  # the conversion would truncate
    # A scale that was rounded down takes the largest to 127.25 or 449 at most, which rounds back.
    return scaled.to(dtype), scale.to(scale_dtype)
