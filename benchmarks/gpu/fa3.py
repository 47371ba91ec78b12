"""FlashAttention 3 (Shah et al. 2024) as a yardstick, from a library that was carried.

vllm 0.25.1's wheel has it compiled for Hopper, torch 2.11 and CUDA 13 as one shared library, which
registers its operators with torch by itself. `carry.py` takes it out of the wheel. The order of the
operator's arguments is that of the schema it registers; all of them are positional.
"""

from __future__ import annotations

import lzma
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

FOLDER_VARIABLE: Final = "NANOCORE_GPU_BENCHMARK_CARRIED"
"""Tells packages of stand_ins where the library is."""
_NAME: Final = "fa3.so"


def is_carried(folder: Path | None) -> bool:
    """Whether the library is in the folder, packed or not."""
    return folder is not None and any((folder / f"{_NAME}{end}").exists() for end in ("", ".xz"))


@cache
def load(folder: Path | None) -> bool:
    """Whether the library is there and its operator registered.

    Raises:
        OSError: it is there and cannot be loaded.
    """
    if folder is None or not is_carried(folder):
        return False
    library = folder / _NAME
    if not library.exists():
        library = _unpack(folder / f"{_NAME}.xz")
    torch.ops.load_library(str(library))
    return hasattr(torch.ops._vllm_fa3_C, "fwd")


def _unpack(packed: Path) -> Path:
    """In the folder for temporary files, once for all processes."""
    library = (
        Path(tempfile.gettempdir()) / f"nanocore-{os.getuid()}-{packed.stat().st_size}-{_NAME}"
    )
    if not library.exists():
        part = library.with_suffix(f".{os.getpid()}")
        with lzma.open(packed) as source, part.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        part.replace(library)
    return library


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
    softcap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention, [T, H, D]; the last query of a sequence sees all of its keys.

    k, v: [N, S, K, D] with seq_lens_B and block_table_BM, or [T, K, D] with key_start_A.
    window: tokens before and after that are seen; -1 is all. num_splits: of the keys; 0 lets the
    kernel choose, which a graph must not.
    """
    absent: Any = None
    results = torch.ops._vllm_fa3_C.fwd(
        q_THD, k, v,
        absent, absent, absent,  # k_new, v_new, q_v
        out,
        query_start_A, key_start_A, absent,  # cu_seqlens_q, _k, _k_new
        absent, seq_lens_B,  # seqused_q, seqused_k
        max_query, max_context,
        block_table_BM,
        absent, absent, absent, absent, absent,  # kv_batch_idx, leftpad_k, rotary's three
        absent, absent, absent,  # descales
        scale, True, *window, softcap, True,  # causal; interleaved rotary
        absent, num_splits, absent, 0,  # scheduler metadata, splits, pack_gqa, sm_margin
        absent, 1, 0, absent,  # sinks, and context parallelism: one rank
    )  # fmt: skip
    return results[0]
