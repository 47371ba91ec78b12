"""FlashAttention 3 (Shah et al. 2024) as a yardstick, from a library that was carried.

The wheel of vLLM has it compiled for Hopper, torch 2.11 and CUDA 13 as one shared library, which
registers its operators with torch by itself. `carry.py` takes it out of the wheel. The order of the
operator's arguments is that of the schema it registers; all of them are positional.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.gpu.results import UnavailableError

FOLDER_VARIABLE: Final = "NANOCORE_GPU_BENCHMARK_CARRIED"
"""Tells the stand-in for flash_attn where the library is."""
LIBRARY: Final = "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"


@cache
def load(folder: Path | None) -> None:
    """Register its operator.

    Raises:
        UnavailableError: it was not carried. OSError: it cannot be loaded.
    """
    if folder is None or not (folder / LIBRARY).exists():
        raise UnavailableError("not carried: FlashAttention 3")
    torch.ops.load_library(str(folder / LIBRARY))


def attention(
    q_THD: Tensor,
    k: Tensor,
    v: Tensor,
    query_start_A: Tensor,
    max_query: int,
    max_context: int,
    *,
    scale: float,
    seq_lens_B: Tensor | None = None,
    block_table_BM: Tensor | None = None,
    key_start_A: Tensor | None = None,
    num_splits: int = 0,
    window: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Causal attention, [T, H, D]; the last query of a sequence sees all of its keys.

    k, v: [N, S, K, D] with seq_lens_B and block_table_BM, or [T, K, D] with key_start_A.
    window: tokens before and after that are seen; -1 is all. num_splits: of the keys; 0 lets the
    kernel choose, which a graph must not.
    """
    absent: Any = None
    results = torch.ops._vllm_fa3_C.fwd(
        q_THD, k, v,
        absent, absent, absent, absent,  # k_new, v_new, q_v, out
        query_start_A, key_start_A, absent,  # cu_seqlens_q, _k, _k_new
        absent, seq_lens_B,  # seqused_q, seqused_k
        max_query, max_context,
        block_table_BM,
        absent, absent, absent, absent, absent,  # kv_batch_idx, leftpad_k, rotary's three
        absent, absent, absent,  # descales
        scale, True, *window, 0.0, True,  # causal; softcap; interleaved rotary
        absent, num_splits, absent, 0,  # scheduler metadata, splits, pack_gqa, sm_margin
        absent, 1, 0, absent,  # sinks, and context parallelism: one rank
    )  # fmt: skip
    return results[0]
