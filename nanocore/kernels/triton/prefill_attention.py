"""Attention of prefill chunks: large tiles of queries, for tensor cores.

A tile is some query tokens of one sequence times the heads of one KV head's group. How chunks share
out a step is known on the device only: there are as many programs as there could be tiles, and
each finds its own by binary search (as in vLLM's Triton kernel). Tiles of keys lie at multiples of
their size from the context's start, wherever a chunk begins. So with equal tile shapes a token's
bits depend on its sequence alone, however that is chunked and whatever is beside it in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from nanocore.kernels.triton.attention_tile import attend

if TYPE_CHECKING:
    from nanocore.kernels.backend import AttentionMetadata, AttentionSpec, KVCache


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """How the kernel is compiled. rows: query tokens times heads; keys; both powers of two.

    There are more rows where a single token's heads are more.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@triton.jit
def _find_sequence(query_start, first_seq, num_seqs, tile, QUERIES: tl.constexpr) -> tuple:
    """(sequence, the how many-th of its tiles) of a tile of the step; perhaps past its last.

    Tiles of sequence i begin where its tokens would, in tiles, if each one before it left a tile
    unfinished. The search is for the last sequence that begins no later than this tile.
    """
    origin = tl.load(query_start + first_seq)
    low, high = first_seq, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        begin = (tl.load(query_start + middle) - origin) // QUERIES + middle - first_seq
        low = tl.where(begin <= tile, middle, low)
        high = tl.where(begin <= tile, high, middle)
    begin = (tl.load(query_start + low) - origin) // QUERIES + low - first_seq
    return low, tile - begin


@triton.jit
def _tile_ranges(first, last, WINDOW: tl.constexpr, TILE: tl.constexpr) -> tuple:
    """Where the tiles of keys of queries at positions first to last begin and end, in this order:

    those that not all queries see since the window has left them, those that all see, those that
    the first queries come before.
    """
    end = tl.cdiv(tl.maximum(last + 1, 0), TILE)
    full_end = tl.maximum(first + 1, 0) // TILE
    begin, full_begin = 0, 0
    if WINDOW:
        begin = tl.maximum(first - WINDOW + 1, 0) // TILE
        full_begin = tl.minimum(tl.cdiv(tl.maximum(last - WINDOW + 1, 0), TILE), full_end)
    return begin, full_begin, full_end, end


@triton.jit(
    do_not_specialize=["num_seqs", "table_stride"],
    do_not_specialize_on_alignment=["block_table", "query_start", "seq_lens", "num_decodes"],
)
def prefill_attention_kernel(
    q, k_cache, v_cache, k_scale, v_scale, out,
    block_table, query_start, seq_lens, num_decodes, num_seqs, q_stride, table_stride,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """num_decodes: how many sequences are left to another kernel; None: no sequence is.

    Grid: (KV heads, tiles); the last tiles, which tend to see most keys, come first.
    """
    head, tile = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    first_seq = 0 if num_decodes is None else tl.load(num_decodes)
    num_tokens = tl.load(query_start + num_seqs) - tl.load(query_start + first_seq)
    if tile >= num_tokens // QUERIES + num_seqs - first_seq:
        return
    seq, seq_tile = _find_sequence(query_start, first_seq, num_seqs, tile, QUERIES)
    first_token = tl.load(query_start + seq)
    num_queries = tl.load(query_start + seq + 1) - first_token
    first_query = seq_tile * QUERIES
    if first_query >= num_queries:
        return

    seq_len = tl.load(seq_lens + seq)
    past = seq_len - num_queries  # negative for padding, which then sees no key
    rows, dims = tl.arange(0, QUERIES * GROUP_PAD), tl.arange(0, HEAD_DIM_PAD)
    queries, heads = rows // GROUP_PAD, rows % GROUP_PAD
    is_query = (first_query + queries < num_queries) & (heads < GROUP)
    mask = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    columns = (head * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    token = (first_token + first_query).to(tl.int64)
    q_tile = tl.load(q + token * q_stride + queries[:, None] * q_stride + columns, mask, other=0.0)

    acc = tl.zeros([QUERIES * GROUP_PAD, HEAD_DIM_PAD], tl.float32)
    peak = tl.full([QUERIES * GROUP_PAD], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES * GROUP_PAD], tl.float32)
    positions = past + first_query + queries
    last_position = past + tl.minimum(first_query + QUERIES, num_queries) - 1
    begin, full_begin, full_end, end = _tile_ranges(past + first_query, last_position, WINDOW, TILE)
    table_row = block_table + seq.to(tl.int64) * table_stride
    for part in tl.static_range(0 if WINDOW else 1, 3):
        acc, peak, total = attend(
            acc, peak, total, q_tile, positions,
            begin if part == 0 else (full_begin if part == 1 else full_end),
            full_begin if part == 0 else (full_end if part == 1 else end),
            k_cache, v_cache, k_scale, v_scale, table_row, seq_len, head,
            SCALE, WINDOW, SOFTCAP, KV_HEADS, HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE, TILE,
            MASKED=part != 1,
        )  # fmt: skip
    result = acc / tl.where(total == 0, 1.0, total)[:, None]
    out_tile = out + token * (KV_HEADS * GROUP * HEAD_DIM)
    pointers = out_tile + queries[:, None] * (KV_HEADS * GROUP * HEAD_DIM) + columns
    tl.store(pointers, result.to(out.dtype.element_ty), mask=mask)


def prefill_attention(
    q_THD: Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    out_THD: Tensor,
    tiles: PrefillTiles,
    *,
    max_tokens: int,
    max_seqs: int,
    has_decodes: bool,
) -> None:
    """Write the rows of the chunks, and with has_decodes those of the decodes too.

    out_THD is contiguous. max_tokens, max_seqs: of which there are no more, in the step and in any
    that a graph replays.
    """
    num_heads, head_dim = q_THD.shape[1:]
    block_size, num_kv_heads = cache.k_NSKD.shape[1:3]
    group = num_heads // num_kv_heads
    group_pad = triton.next_power_of_2(group)
    num_queries = max(1, tiles.rows // group_pad)
    table_BM = metadata.block_table_BM
    prefill_attention_kernel[(num_kv_heads, max_tokens // num_queries + max_seqs)](
        q_THD, cache.k_NSKD, cache.v_NSKD, cache.k_scale_NSK, cache.v_scale_NSK, out_THD,
        table_BM, metadata.query_start_A, metadata.seq_lens_B,
        None if has_decodes else metadata.num_decodes_1, len(metadata.seq_lens),
        q_THD.stride(0), table_BM.stride(0),
        SCALE=spec.scale, WINDOW=spec.window, SOFTCAP=spec.softcap,
        KV_HEADS=num_kv_heads, GROUP=group, GROUP_PAD=group_pad, QUERIES=num_queries,
        HEAD_DIM=head_dim, HEAD_DIM_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size, TILE=tiles.keys,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
