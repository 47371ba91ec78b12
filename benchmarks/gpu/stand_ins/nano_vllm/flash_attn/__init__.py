"""The two functions of flash-attn that nano-vllm calls, over FlashAttention 3 or our own kernels.

This is no part of flash-attn: it has the names of its functions so that an engine written for them
runs on a machine that the package has no wheel for. Which attention is under it is chosen by the
environment, so that engines can be compared with the same kernels, and apart from them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from benchmarks.gpu import fa3
from benchmarks.gpu.paged_attention import attend_paged

__version__ = "0.0.0"

_USES_FA3: Final = os.environ.get("NANOCORE_STAND_IN_ATTENTION", "triton") == "fa3"
_NUM_SPLITS: Final = 8
"""Of the keys of a decode: a number that does not depend on the step, for graphs."""

if _USES_FA3 and not fa3.load(Path(os.environ[fa3.FOLDER_VARIABLE])):
    raise ImportError("the library of FlashAttention 3 was not carried")


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor,
    softmax_scale: float,
    causal: bool = True,
    block_table: Tensor | None = None,
) -> Tensor:
    """Prompts, [T, H, D]; k and v are their own, or the cache if there is a block table."""
    assert causal
    if _USES_FA3:
        paged = block_table is not None
        return fa3.attention(
            q, k, v, cu_seqlens_q, max_seqlen_q, max_seqlen_k,
            scale=softmax_scale,
            key_start_A=None if paged else cu_seqlens_k,
            seq_lens_B=cu_seqlens_k.diff() if paged else None,
            block_table_BM=block_table,
        )  # fmt: skip
    if block_table is None:
        k, v, block_table = _as_pages(k, v, cu_seqlens_k, max_seqlen_k)
    lengths_B = cu_seqlens_k.diff().to(torch.int32)
    return attend_paged(q, k, v, cu_seqlens_q, lengths_B, block_table, softmax_scale, num_decodes=0)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float,
    causal: bool = True,
) -> Tensor:
    """Decodes, [B, 1, H, D] as q is."""
    assert causal
    batch = len(q)
    starts_A = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    if _USES_FA3:
        longest = block_table.shape[1] * k_cache.shape[1]
        out = fa3.attention(
            q[:, 0], k_cache, v_cache, starts_A, 1, longest,
            scale=softmax_scale,
            seq_lens_B=cache_seqlens,
            block_table_BM=block_table,
            num_splits=_NUM_SPLITS if batch <= 32 else 1,
        )  # fmt: skip
        return out[:, None]
    out = attend_paged(
        q[:, 0], k_cache, v_cache, starts_A, cache_seqlens, block_table, softmax_scale, batch
    )
    return out[:, None]


def _as_pages(
    k: Tensor, v: Tensor, starts_A: Tensor, longest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """K and V of prompts as pages of 64 tokens each: a prompt's tokens, padded to whole pages."""
    size = 64
    width = -(-longest // size)
    batch = len(starts_A) - 1
    pages = [x.new_zeros(batch * width * size, *x.shape[1:]) for x in (k, v)]
    lengths = starts_A.diff()
    rows = torch.repeat_interleave(torch.arange(batch, device=k.device), lengths)
    places = torch.arange(len(k), device=k.device) - starts_A[rows] + rows * width * size
    for page, x in zip(pages, (k, v), strict=True):
        page[places] = x
    table = torch.arange(batch * width, dtype=torch.int32, device=k.device).view(batch, width)
    k_pages, v_pages = (page.view(batch * width, size, *page.shape[1:]) for page in pages)
    return k_pages, v_pages, table
