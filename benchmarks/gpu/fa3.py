"""FlashAttention 3 (Shah et al. 2024) as a yardstick, from a library that was carried.

The wheel of vLLM has it compiled for Hopper, torch 2.11 and CUDA 13 as one shared library, which
registers its operators with torch by itself. `carry.py` takes it out of the wheel. The order of the
operators' arguments is that of the schemas it registers; all of them are positional.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.gpu.results import UnavailableError

FOLDER_VARIABLE: Final = "NANOCORE_GPU_BENCHMARK_CARRIED"
"""Tells the stand-ins for flash-attn where the library is."""
LIBRARY: Final = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"


@cache
def load(folder: Path | None) -> None:
    """Register its operators.

    Raises:
        UnavailableError: it was not carried. OSError: it cannot be loaded.
    """
    if folder is None or not (folder / LIBRARY).exists():
        raise UnavailableError("not carried: FlashAttention 3")
    torch.ops.load_library(str(folder / LIBRARY))


def load_for_stand_in() -> None:
    """Register its operators, for a module that has the name of one of flash-attn.

    Raises:
        ImportError: it was not carried, or cannot be loaded.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    try:
        load(Path(folder) if folder else None)
    except (UnavailableError, OSError) as error:
        raise ImportError(f"{FOLDER_VARIABLE}={folder or ''}: {error}") from error


def attention(
    q_THD: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_A: Tensor,
    max_query: int,
    max_context: int | None,
    *,
    scale: float,
    seq_lens_B: Tensor | None = None,
    block_table_BM: Tensor | None = None,
    key_start_A: Tensor | None = None,
    num_splits: int = 0,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    out_THD: Tensor | None = None,
    plan: Tensor | None = None,
) -> Tensor:
    """Causal attention, [T, H, D]; the last query of a sequence sees all of its keys.

    k, v: [N, S, K, D] with seq_lens_B and block_table_BM, or [T, K, D] with key_start_A.
    max_context: None: all that the block table has room for. window: tokens before and after that
    are seen; -1 is all. num_splits: of the keys, at most; 0 lets the kernel choose, which a graph
    must not. out_THD: where the result goes. plan: see `scheduler_metadata`.
    """
    absent: Any = None
    results = torch.ops._vllm_fa3_C.fwd(
        q_THD, k, v,
        absent, absent, absent, out_THD,  # k_new, v_new, q_v, out
        query_start_A, key_start_A, absent,  # cu_seqlens_q, _k, _k_new
        absent, seq_lens_B,  # seqused_q, seqused_k
        max_query, max_context,
        block_table_BM,
        absent, absent, absent, absent, absent,  # kv_batch_idx, leftpad_k, rotary's three
        absent, absent, absent,  # descales
        scale, True, *window, softcap, True,  # causal; interleaved rotary
        plan, num_splits, absent, 0,  # scheduler metadata, splits, pack_gqa, sm_margin
        absent, 1, 0, absent,  # sinks, and context parallelism: one rank
    )  # fmt: skip
    return results[0]


def scheduler_metadata(
    seq_lens_B: Tensor,
    query_start_A: Tensor,
    max_query: int,
    max_context: int,
    *,
    heads: tuple[int, int, int],
    page_size: int,
    dtype: torch.dtype,
    num_splits: int = 0,
    window: tuple[int, int] = (-1, -1),
    has_softcap: bool = False,
) -> Tensor:
    """How a step's work is shared among multiprocessors, int32, for every call of `attention` that
    has the same arguments; without it each call computes its own.

    heads: of queries, of keys and values, and their size. max_context: what `attention` is given,
    or what the block table has room for.
    """
    absent: Any = None
    num_heads, num_kv_heads, head_dim = heads
    return torch.ops._vllm_fa3_C.get_scheduler_metadata(
        len(seq_lens_B), max_query, max_context,
        num_heads, num_kv_heads, head_dim, head_dim,  # of V, too
        dtype, seq_lens_B,
        query_start_A, absent, absent,  # cu_seqlens_q, _k, _k_new
        absent, absent,  # seqused_q, leftpad_k
        page_size, 0,  # max_seqlen_k_new
        True, *window, has_softcap,  # causal
        num_splits, absent, 0,  # pack_gqa, sm_margin
    )  # fmt: skip
