"""The two functions of FlashAttention 3 that our flash backend calls, over the carried library.

This is no part of flash-attn: it has the names of its functions, and of the arguments that are
given, so that `--attention-backend flash` runs on a machine that the package has no wheel for.
Unlike upstream's, `flash_attn_with_kvcache` takes `out`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu import fa3

__version__ = "0.0.0"

fa3.load_for_stand_in()


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
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of decodes and chunks over paged K and V, [T, H, D] as q is."""
    assert causal
    return fa3.attention(
        q, k_cache, v_cache, cu_seqlens_q, max_seqlen_q, None,
        scale=softmax_scale,
        seq_lens_B=cache_seqlens,
        block_table_BM=page_table,
        num_splits=num_splits,
        window=window_size,
        softcap=softcap,
        out_THD=out,
        plan=scheduler_metadata,
    )  # fmt: skip


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    *,
    cu_seqlens_q: Tensor,
    page_size: int,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    has_softcap: bool = False,
    num_splits: int = 0,
) -> Tensor:
    """What all calls of a step whose arguments are these can be given, computed on the device.

    max_seqlen_k: of the whole block table, which the function above goes by.
    """
    assert causal
    assert batch_size == len(cache_seqlens)
    return fa3.scheduler_metadata(
        cache_seqlens, cu_seqlens_q, max_seqlen_q, max_seqlen_k,
        heads=(num_heads_q, num_heads_kv, headdim),
        page_size=page_size,
        dtype=qkv_dtype,
        num_splits=num_splits,
        window=window_size,
        has_softcap=has_softcap,
    )  # fmt: skip
