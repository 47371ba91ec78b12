"""The one function of flash-attn 3 that our `flash` backend calls, over the carried library.

This is no part of flash-attn: it has the name of its module, so that the backend can be tried on a
machine for which there is no wheel of it.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from benchmarks.gpu import fa3

if not fa3.load(Path(os.environ[fa3.FOLDER_VARIABLE])):
    raise ImportError("the library of FlashAttention 3 was not carried")


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """Decodes and chunks of one step, [T, H, D]."""
    assert causal
    return fa3.attention(
        q, k_cache, v_cache, cu_seqlens_q, max_seqlen_q, page_table.shape[1] * k_cache.shape[1],
        scale=softmax_scale, seq_lens_B=cache_seqlens, block_table_BM=page_table,
        window=window_size, softcap=softcap,
    )  # fmt: skip
