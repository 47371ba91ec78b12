"""Attention of prefill chunks: large tiles of queries, for tensor cores.

A tile is some query tokens of one sequence times the heads of one KV head's group. How chunks share
out a step is known on the device only: there are as many programs as there could be tiles, and
`attention_plan` says which has what; few chunks over long contexts are split into parts. Tiles of
keys lie at multiples of their size from the context's start, wherever a chunk begins. So with equal
tile shapes, and unsplit, a token's bits depend on its sequence alone, however that is chunked and
whatever is beside it in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from nanocore.kernels.interface import AttentionMetadata, AttentionSpec, KVCache
from nanocore.kernels.triton.attention_parts import PartSums, merge_items, store_rows
from nanocore.kernels.triton.attention_plan import Items, load_part, plan_step
from nanocore.kernels.triton.attention_tile import attend
from nanocore.kernels.triton.launch import pdl, wait_for_inputs

MIN_PART_TILES: Final = 8
"""To write a part's sums and to read them again takes about as long as some tiles of keys."""

_MERGED_ROWS: Final = 4
"""Of a program. There are as many as there could be rows to merge, so there should be few."""


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
def _full_tiles(first, last, WINDOW: tl.constexpr, TILE: tl.constexpr) -> tuple:
    """(first, end) of the tiles of keys that all queries at positions first to last see.

    The window has left those before for some queries, and some queries come before those after.
    """
    begin, end = 0, tl.maximum(first + 1, 0) // TILE
    if WINDOW:
        begin = tl.minimum(tl.cdiv(tl.maximum(last - WINDOW + 1, 0), TILE), end)
    return begin, end


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["block_table"],
)
def prefill_attention_kernel(
    q, k_cache, v_cache, k_scale, v_scale, out, sums, log_sums,
    parts, block_table, q_stride, table_stride,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, QUERIES: tl.constexpr,
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
    rows, dims = tl.arange(0, QUERIES * GROUP_PAD), tl.arange(0, HEAD_DIM_PAD)
    queries, heads = rows // GROUP_PAD, rows % GROUP_PAD
    is_row = (queries < count) & (heads < GROUP)
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    columns = (head * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    q_rows = q + token.to(tl.int64) * q_stride + queries[:, None] * q_stride
    q_tile = tl.load(q_rows + columns, mask=mask, other=0.0)

    acc = tl.zeros([QUERIES * GROUP_PAD, HEAD_DIM_PAD], tl.float32)
    peak = tl.full([QUERIES * GROUP_PAD], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES * GROUP_PAD], tl.float32)
    full_first, full_end = _full_tiles(position, position + count - 1, WINDOW, TILE)
    # In padding there is no key, and all ends are 0.
    full_first = tl.minimum(tl.maximum(full_first, first), end)
    full_end = tl.minimum(tl.maximum(full_end, full_first), end)
    table_row = block_table + seq.to(tl.int64) * table_stride
    for span in tl.static_range(0 if WINDOW else 1, 3):
        acc, peak, total = attend(
            acc, peak, total, q_tile, position + queries,
            first if span == 0 else (full_first if span == 1 else full_end),
            full_first if span == 0 else (full_end if span == 1 else end),
            k_cache, v_cache, k_scale, v_scale, table_row, seq_len, head,
            SCALE, WINDOW, SOFTCAP, KV_HEADS, HEAD_DIM, HEAD_DIM_PAD,
            BLOCK_SIZE, BLOCK_BYTES, TILE,
            MASKED=span != 1,
        )  # fmt: skip
    store_rows(
        acc, peak, total, out, sums, log_sums, token, sum_id, head, queries, heads, is_row,
        KV_HEADS, GROUP, QUERIES, HEAD_DIM, HEAD_DIM_PAD,
    )  # fmt: skip


def prefill_attention(
    q_THD: Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    out_THD: Tensor,
    tiles: PrefillTiles,
    num_shares: int,
    *,
    max_tokens: int,
    max_seqs: int,
    has_decodes: bool,
) -> None:
    """Write the rows of the chunks, and with has_decodes those of the decodes too.

    out_THD is contiguous. max_tokens, max_seqs: of which there are no more, in the step and in any
    that a graph replays. num_shares: see `attention_plan.Items`.
    """
    num_heads, head_dim = q_THD.shape[1:]
    block_size, num_kv_heads = cache.k_NSKD.shape[1:3]
    group = num_heads // num_kv_heads
    group_pad = triton.next_power_of_2(group)
    num_queries = max(1, tiles.rows // group_pad)
    table_BM = metadata.block_table_BM
    items = Items(
        queries=num_queries,
        keys=tiles.keys,
        window=spec.window,
        has_decodes=has_decodes,
        max_items=max_tokens // num_queries + max_seqs,
        block_size=block_size,
        num_shares=num_shares,
        min_tiles=MIN_PART_TILES,
    )
    plan = plan_step(metadata, items)
    memory = PartSums.allocate(plan, num_kv_heads, num_queries * group, out_THD)
    prefill_attention_kernel[(num_kv_heads, len(plan.parts_P8))](
        q_THD, cache.k_NSKD, cache.v_NSKD, cache.k_scale_NSK, cache.v_scale_NSK, out_THD,
        memory.sums, memory.log_sums, plan.parts_P8, table_BM, q_THD.stride(0), table_BM.stride(0),
        SCALE=spec.scale, WINDOW=spec.window, SOFTCAP=spec.softcap,
        KV_HEADS=num_kv_heads, GROUP=group, GROUP_PAD=group_pad, QUERIES=num_queries,
        HEAD_DIM=head_dim, HEAD_DIM_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size, BLOCK_BYTES=cache.block_bytes, TILE=tiles.keys,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **pdl(q_THD.device),
    )  # fmt: skip
    if plan.merges_M4 is not None:
        assert memory.sums is not None
        assert memory.log_sums is not None
        merge_items(
            memory.sums, memory.log_sums, plan.merges_M4, out_THD, num_kv_heads, num_queries,
            _MERGED_ROWS,
        )  # fmt: skip
