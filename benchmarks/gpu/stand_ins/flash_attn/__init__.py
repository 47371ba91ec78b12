"""The two functions of flash-attn that nano-vllm calls, over the carried FlashAttention 3.

This is no part of flash-attn: it has the names of its functions so that an engine written for them
runs on a machine that the package has no wheel for.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from benchmarks.gpu import fa3

__version__ = "0.0.0"

_NUM_SPLITS: Final = 8
"""Of the keys of a decode: a number that does not depend on the step, for graphs."""

fa3.load_for_stand_in()


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
    paged = block_table is not None
    return fa3.attention(
        q, k, v, cu_seqlens_q, max_seqlen_q, max_seqlen_k,
        scale=softmax_scale,
        key_start_A=None if paged else cu_seqlens_k,
        seq_lens_B=cu_seqlens_k.diff() if paged else None,
        block_table_BM=block_table,
    )  # fmt: skip


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
    out = fa3.attention(
        q[:, 0], k_cache, v_cache,
        torch.arange(batch + 1, dtype=torch.int32, device=q.device),
        1, block_table.shape[1] * k_cache.shape[1],
        scale=softmax_scale,
        seq_lens_B=cache_seqlens,
        block_table_BM=block_table,
        num_splits=_NUM_SPLITS if batch <= 32 else 1,
    )  # fmt: skip
    return out[:, None]
