"""Attention of decodes: one query token for each sequence, its context dealt out to programs.

A program takes the query heads of one KV head over a span of the context, so that K and V are read
once (FlashDecoding: Dao et al. 2023). Reading them is all that takes time: tiles come through
shared memory ahead of use. With several spans, float32 parts are merged by a second kernel. A row
depends on its own sequence and on how many spans there are, which the caller chooses from padded
sizes. Programs of neighbouring KV heads read neighbouring memory and so are neighbours in the grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanocore.kernels.triton.attention_tile import attend

if TYPE_CHECKING:
    from nanocore.kernels.backend import AttentionMetadata, AttentionSpec, KVCache

MIN_DOT_ROWS = 16
"""What tensor cores multiply at least; heads of a group are padded to it."""


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """How the kernel is compiled. keys: how many are loaded at once, a power of two."""

    keys: int
    num_warps: int
    num_stages: int


@triton.jit
def _span(seq_len, split, num_splits, WINDOW: tl.constexpr, TILE: tl.constexpr) -> tuple:
    """(first tile, end tile) of a split, perhaps none: whole tiles, shared out evenly."""
    first = tl.maximum(seq_len - WINDOW, 0) // TILE if WINDOW else 0
    end = tl.cdiv(seq_len, TILE)
    size = tl.cdiv(end - first, num_splits)
    begin = first + split * size
    return begin, tl.minimum(begin + size, end)


@triton.jit(
    do_not_specialize=["table_stride"],
    # Views of a step's metadata begin anywhere, and a new alignment would be compiled anew.
    do_not_specialize_on_alignment=["block_table", "seq_lens", "num_decodes"],
)
def decode_attention_kernel(
    q, k_cache, v_cache, k_scale, v_scale, out, log_sums,
    block_table, seq_lens, num_decodes, q_stride, table_stride,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """out: [B, H, splits, D]; log_sums: log2 of the weights' sum, [B, H, splits], None if 1 split.

    Grid: (KV heads, sequences, splits).
    """
    head, seq, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    if seq >= tl.load(num_decodes):
        return
    seq_len = tl.load(seq_lens + seq)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM_PAD)
    mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = q + seq.to(tl.int64) * q_stride + (head * GROUP + rows) * HEAD_DIM
    q_tile = tl.load(q_rows[:, None] + dims[None, :], mask=mask, other=0.0)

    first_tile, end_tile = _span(seq_len, split, num_splits, WINDOW, TILE)
    acc, peak, total = attend(
        tl.zeros([ROWS, HEAD_DIM_PAD], tl.float32),
        tl.full([ROWS], -float("inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        q_tile, tl.zeros([ROWS], tl.int32) + (seq_len - 1), first_tile, end_tile,
        k_cache, v_cache, k_scale, v_scale,
        block_table + seq.to(tl.int64) * table_stride, seq_len, head,
        SCALE, WINDOW, SOFTCAP, KV_HEADS, HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE, TILE,
        # Masks cost nothing that waiting for memory would not; one loop keeps loads ahead of use.
        MASKED=True,
    )  # fmt: skip
    total = tl.where(total == 0, 1.0, total)
    result = acc / total[:, None]
    out_rows = ((seq * KV_HEADS + head) * GROUP + rows) * num_splits + split
    pointers = out + out_rows.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(pointers, result.to(out.dtype.element_ty), mask=mask)
    if log_sums is not None:
        tl.store(log_sums + out_rows, peak + tl.log2(total), mask=rows < GROUP)


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["num_decodes"])
def merge_splits_kernel(
    parts, log_sums, out, num_decodes, num_splits,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr, SPLITS_PAD: tl.constexpr,
) -> None:  # fmt: skip
    """The mean of a head's parts, weighted by their sums. Grid: (heads, sequences)."""
    head, seq = tl.program_id(0), tl.program_id(1)
    if seq >= tl.load(num_decodes):
        return
    row = seq.to(tl.int64) * tl.num_programs(0) + head
    splits, dims = tl.arange(0, SPLITS_PAD), tl.arange(0, HEAD_DIM_PAD)
    log_sum = tl.load(
        log_sums + row * num_splits + splits, mask=splits < num_splits, other=-float("inf")
    )
    peak = tl.max(log_sum, axis=0)
    weights = tl.exp2(log_sum - tl.where(peak == -float("inf"), 0.0, peak))
    pointers = parts + (row * num_splits + splits)[:, None] * HEAD_DIM + dims[None, :]
    mask = (splits < num_splits)[:, None] & (dims < HEAD_DIM)[None, :]
    sums = tl.sum(tl.load(pointers, mask=mask, other=0.0) * weights[:, None], axis=0)
    total = tl.sum(weights, axis=0)
    result = sums / tl.where(total == 0, 1.0, total)
    tl.store(out + row * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def decode_attention(
    q_THD: Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    out_THD: Tensor,
    tiles: DecodeTiles,
    num_splits: int,
) -> None:
    """Write the rows of the decodes; out_THD is contiguous. metadata.num_decodes is above 0."""
    num_seqs, num_heads, head_dim = metadata.num_decodes, *q_THD.shape[1:]
    block_size, num_kv_heads = cache.k_NSKD.shape[1:3]
    group, head_dim_pad = num_heads // num_kv_heads, triton.next_power_of_2(head_dim)
    parts, log_sums = out_THD, None
    if num_splits > 1:
        shape = num_seqs, num_heads, num_splits
        parts = torch.empty(*shape, head_dim, dtype=torch.float32, device=q_THD.device)
        log_sums = torch.empty(shape, dtype=torch.float32, device=q_THD.device)
    table_BM = metadata.block_table_BM
    decode_attention_kernel[(num_kv_heads, num_seqs, num_splits)](
        q_THD, cache.k_NSKD, cache.v_NSKD, cache.k_scale_NSK, cache.v_scale_NSK, parts, log_sums,
        table_BM, metadata.seq_lens_B, metadata.num_decodes_1, q_THD.stride(0), table_BM.stride(0),
        SCALE=spec.scale, WINDOW=spec.window, SOFTCAP=spec.softcap,
        KV_HEADS=num_kv_heads, GROUP=group,
        ROWS=max(MIN_DOT_ROWS, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim, HEAD_DIM_PAD=head_dim_pad, BLOCK_SIZE=block_size, TILE=tiles.keys,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    if num_splits > 1:
        merge_splits_kernel[(num_heads, num_seqs)](
            parts, log_sums, out_THD, metadata.num_decodes_1, num_splits,
            HEAD_DIM=head_dim, HEAD_DIM_PAD=head_dim_pad,
            SPLITS_PAD=triton.next_power_of_2(num_splits), num_warps=4,
        )  # fmt: skip
