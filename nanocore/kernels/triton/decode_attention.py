"""Attention of decodes: one query token for each sequence, long contexts dealt out to programs.

A program takes the query heads of one KV head over a part of the context, so that K and V are read
once (FlashDecoding: Dao et al. 2023). Reading them is all that takes time: tiles come through
shared memory ahead of use. Which context is split, and where, is up to `attention_plan`. Programs
of neighbouring KV heads read neighbouring memory and so are neighbours in the grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from nanocore.kernels.interface import AttentionMetadata, AttentionSpec, KVCache
from nanocore.kernels.triton.attention_parts import PartSums, store_rows
from nanocore.kernels.triton.attention_plan import Items, load_part, plan_step
from nanocore.kernels.triton.attention_tile import attend
from nanocore.kernels.triton.launch import pdl, wait_for_inputs

MIN_DOT_ROWS: Final = 16
"""What tensor cores multiply at least; heads of a group are padded to it."""

MIN_PART_TILES: Final = 1
"""Few contexts are split as far as they can be: waiting for memory is all that takes time."""


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """How the kernel is compiled. keys: how many are loaded at once, a power of two."""

    keys: int
    num_warps: int
    num_stages: int


@triton.jit(
    do_not_specialize=["table_stride"],
    # Views of a step's metadata begin anywhere, and a new alignment would be compiled anew.
    do_not_specialize_on_alignment=["block_table"],
)
def decode_attention_kernel(
    q, k_cache, v_cache, k_scale, v_scale, out, sums, log_sums,
    parts, block_table, q_stride, table_stride,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_BYTES: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """parts: see `attention_plan`. out, sums, log_sums: see `store_rows`.

    Grid: (KV heads, parts).
    """
    wait_for_inputs(PDL)
    head = tl.program_id(0)
    token, count, position, seq, seq_len, first, end, sum_id = load_part(parts, tl.program_id(1))
    if count == 0:
        return
    rows, dims = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM_PAD)
    mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = q + token.to(tl.int64) * q_stride + (head * GROUP + rows) * HEAD_DIM
    q_tile = tl.load(q_rows[:, None] + dims[None, :], mask=mask, other=0.0)
    acc, peak, total = attend(
        tl.zeros([ROWS, HEAD_DIM_PAD], tl.float32),
        tl.full([ROWS], -float("inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        q_tile, tl.zeros([ROWS], tl.int32) + position, first, end,
        k_cache, v_cache, k_scale, v_scale,
        block_table + seq.to(tl.int64) * table_stride, seq_len, head,
        SCALE, WINDOW, SOFTCAP, KV_HEADS, HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE, BLOCK_BYTES, TILE,
        # Masks cost nothing that waiting for memory would not; one loop keeps loads ahead of use.
        MASKED=True,
    )  # fmt: skip
    store_rows(
        acc, peak, total, out, sums, log_sums, token, sum_id, head,
        tl.zeros([ROWS], tl.int32), rows, rows < GROUP, KV_HEADS, GROUP, 1, HEAD_DIM, HEAD_DIM_PAD,
    )  # fmt: skip


def decode_attention(
    q_THD: Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    out_THD: Tensor,
    tiles: DecodeTiles,
    num_shares: int,
) -> None:
    """Write the rows of the decodes; out_THD is contiguous. metadata.num_decodes is above 0.

    num_shares: see `attention_plan.Items`.
    """
    num_heads, head_dim = q_THD.shape[1:]
    block_size, num_kv_heads = cache.k_NSKD.shape[1:3]
    group, table_BM = num_heads // num_kv_heads, metadata.block_table_BM
    items = Items(
        queries=0,
        keys=tiles.keys,
        window=spec.window,
        has_decodes=False,
        max_items=metadata.num_decodes,
        block_size=block_size,
        num_shares=num_shares,
        min_tiles=MIN_PART_TILES,
    )
    plan = plan_step(metadata, items)
    memory = PartSums.allocate(plan, num_kv_heads, group, out_THD)
    decode_attention_kernel[(num_kv_heads, len(plan.parts_P8))](
        q_THD, cache.k_NSKD, cache.v_NSKD, cache.k_scale_NSK, cache.v_scale_NSK, out_THD,
        memory.sums, memory.log_sums, plan.parts_P8, table_BM, q_THD.stride(0), table_BM.stride(0),
        SCALE=spec.scale, WINDOW=spec.window, SOFTCAP=spec.softcap,
        KV_HEADS=num_kv_heads, GROUP=group,
        ROWS=max(MIN_DOT_ROWS, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim, HEAD_DIM_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size, BLOCK_BYTES=cache.block_bytes, TILE=tiles.keys,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **pdl(q_THD.device),
    )  # fmt: skip
    memory.merge(plan, num_kv_heads, num_queries=1, block_rows=1, out_THD=out_THD)
