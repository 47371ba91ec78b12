"""Attention over the paged cache: decodes by one kernel and chunks by another, and their shapes.

What is launched follows from padded sizes and from what the host knows at capture, so a CUDA graph
replays it for any step that fits; long contexts are split by what only the device knows, see
`plan_decodes` and `attention_plan`. Batch-invariant, all tokens go through the kernel of chunks,
unsplit, in tiles of one shape: what a token gets then never depends on how its tokens came, or
beside whom. Shapes were chosen by what fits a multiprocessor, and for bfloat16 by what an H100 was
fastest with; `DecodeTiles` and `PrefillTiles` are arguments of the kernels' own functions, so that
others can be tried. Shape suffixes: see `interface`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache as remember
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanocore.kernels.attention import AttentionMetadata, AttentionSpec, KVCache
from nanocore.kernels.triton.attention_plan import (
    Items,
    load_part,
    merge_items,
    plan_step,
    store_rows,
)
from nanocore.kernels.triton.attention_tile import attend
from nanocore.kernels.triton.decode_attention import DecodeTiles, decode_attention, decode_rows
from nanocore.kernels.triton.launch import pdl, wait_for_inputs

MIN_PART_TILES: Final = 8
"""To write a part's sums and to read them again takes about as long as some tiles of keys."""

MAX_TILE: Final = 64 * 128
"""Rows times head dimensions of a decode of several tokens, at most."""

_MERGED_ROWS: Final = 4
"""Rows per program. Programs are as many as could be needed, so there should be few."""


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """Compile-time shape of the kernel. rows: query tokens times heads; keys; both powers of two.

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


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["block_table"])
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
    sums = log_sums = None
    if plan.merges_M4 is not None:
        log_sums = torch.empty(
            plan.num_sums, num_kv_heads, num_queries * group,
            dtype=torch.float32, device=out_THD.device,
        )  # fmt: skip
        sums = log_sums.new_empty(*log_sums.shape, head_dim)
    prefill_attention_kernel[(num_kv_heads, len(plan.parts_P8))](
        q_THD, cache.k_NSKD, cache.v_NSKD, cache.k_scale_NSK, cache.v_scale_NSK, out_THD,
        sums, log_sums, plan.parts_P8, table_BM, q_THD.stride(0), table_BM.stride(0),
        SCALE=spec.scale, WINDOW=spec.window, SOFTCAP=spec.softcap,
        KV_HEADS=num_kv_heads, GROUP=group, GROUP_PAD=group_pad, QUERIES=num_queries,
        HEAD_DIM=head_dim, HEAD_DIM_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size, BLOCK_BYTES=cache.block_bytes, TILE=tiles.keys,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **pdl(q_THD.device),
    )  # fmt: skip
    if plan.merges_M4 is not None and sums is not None and log_sums is not None:
        merge_items(
            sums, log_sums, plan.merges_M4, out_THD, num_kv_heads, num_queries, _MERGED_ROWS
        )


_LARGE_SHARED_MEMORY: Final = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Compute capabilities of data centers: 163 KiB or more a program, where others have 99."""


def paged_attention(
    q_THD: Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    *,
    num_sms: int,
    batch_invariant: bool,
) -> Tensor:
    """See `AttentionKernels.paged_attention`. q_THD may have gaps between tokens.

    Padding within the step, sequences of length 0, gets zeros from the kernels.
    """
    assert spec.scale > 0, f"the greatest of scaled scores is sought unscaled: {spec.scale}"
    assert q_THD.stride()[1:] == (q_THD.shape[2], 1), q_THD.stride()
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    num_tokens, num_decodes = metadata.query_start[-1], metadata.num_decodes
    if num_tokens < len(out_THD):
        out_THD[num_tokens:] = 0
    head_dim, capability = q_THD.shape[2], _capability(q_THD.device)
    num_kv_heads = cache.k_NSKD.shape[2]
    group = q_THD.shape[1] // num_kv_heads
    num_rows = 0 if metadata.decode_tokens == 1 else decode_rows(metadata.decode_tokens, group)
    # More rows do not fit a program's registers: such decodes go with the chunks.
    has_decodes = batch_invariant or num_rows * triton.next_power_of_2(head_dim) > MAX_TILE
    if num_rows and has_decodes:
        out_THD.zero_()  # what comes after the last sequence only the device knows
    num_shares = 1 if batch_invariant else choose_num_shares(num_kv_heads, num_sms)
    if num_decodes and not has_decodes:
        shape = decode_tiles(head_dim, cache.k_NSKD.itemsize, capability, num_rows)
        num_programs = choose_num_programs(num_decodes, num_kv_heads, num_sms, shape.per_sm)
        decode_attention(q_THD, cache, metadata, spec, out_THD, shape, num_programs)
    # In a step to be replayed all could be chunks, as the host's bounds tell: see
    # `HostBounds.of_shape`. In others decodes are apart, and programs for them would cost time.
    num_decoded = 0 if has_decodes else metadata.num_decoded
    if num_tokens > num_decoded:
        is_plain = cache.k_NSKD.dtype == q_THD.dtype and cache.k_NSKD.shape[1] % 64 == 0
        tiles = prefill_tiles(head_dim, q_THD.itemsize, capability, is_plain=is_plain)
        prefill_attention(
            q_THD, cache, metadata, spec, out_THD, tiles, num_shares,
            max_tokens=num_tokens - num_decoded,
            max_seqs=len(metadata.seq_lens) - (num_decodes if num_decoded else 0),
            has_decodes=has_decodes,
        )  # fmt: skip
    return out_THD


def choose_num_shares(num_kv_heads: int, num_sms: int) -> int:
    """Number of shares of what a KV head's chunks read: two a multiprocessor, in all KV heads."""
    return max(1, 2 * num_sms // num_kv_heads)


def choose_num_programs(max_seqs: int, num_kv_heads: int, num_sms: int, per_sm: int) -> int:
    """Number of programs for the decodes of a KV head.

    As many as multiprocessors hold at once, or as many as there are sequences where these are more:
    programs then begin as others end, and most of them have a sequence for themselves.
    """
    return max(1, per_sm * num_sms // num_kv_heads, max_seqs)


def decode_tiles(
    head_dim: int, cache_itemsize: int, capability: tuple[int, int], num_rows: int = 0
) -> DecodeTiles:
    """Choose tiles by the bytes of a token's K or V in a head.

    num_rows: of decodes that may have several tokens, 0 if they have one: see `decode_rows`. What
    more rows take of registers and shared memory the keys of a quantized tile leave to them.

    A block's id is loaded as far ahead of its K and V as these are of their use: of n stages,
    (n - 1) / 2 tiles of K and as many of V are in flight. With 5, and 16 KiB a tile, two programs
    on each multiprocessor of an H100 read 32 contexts of 1,024 tokens in 51 us, and three in 58 us;
    FlashAttention 3 takes 60 us. Quantized ones an H200 read in 39 us by 128 keys, and in 45 us by
    64. Wide heads that are quantized take more memory, for what they are converted to.
    """
    width = triton.next_power_of_2(head_dim)
    is_large = capability in _LARGE_SHARED_MEMORY
    is_hopper = is_large and capability >= (9, 0)
    most_keys = 128 if cache_itemsize == 1 and is_hopper and not num_rows else 64
    tile_bytes = 8192 if cache_itemsize == 1 and num_rows else 16384
    keys = max(16, min(most_keys, tile_bytes // (width * cache_itemsize)))
    is_narrow = cache_itemsize > 1 or width <= 128 or is_hopper
    per_sm = 2 if is_narrow and (num_rows <= 32 or is_hopper) else 1
    return DecodeTiles(keys, num_warps=4, num_stages=5 if is_large else 3, per_sm=per_sm)


def prefill_tiles(
    head_dim: int, itemsize: int, capability: tuple[int, int], *, is_plain: bool
) -> PrefillTiles:
    """One shape for all steps, so that how a prompt is chunked never changes a bit of it.

    Hopper's matrix instructions take 64 rows for each four warps. Of programs of 64 rows two fit a
    multiprocessor: one's products go on beside the other's softmax. In float32 there are no such
    instructions: small tiles, for a result to check others by.

    is_plain: K and V are of q's dtype, in blocks of whole tiles.
    """
    is_large = capability in _LARGE_SHARED_MEMORY
    if itemsize == 4:
        return PrefillTiles(rows=16, keys=16, num_warps=4, num_stages=2)
    if head_dim > 128:
        return PrefillTiles(rows=64, keys=64 if is_large else 32, num_warps=8, num_stages=3)
    if capability < (9, 0) or not is_large:
        return PrefillTiles(rows=64, keys=32, num_warps=4, num_stages=3)
    # On an H100 two stages are 3 to 5 % faster than three, and than tiles of 128 rows or keys.
    num_stages = 2 if is_plain and head_dim > 64 else 3
    return PrefillTiles(rows=64, keys=64, num_warps=4, num_stages=num_stages)


@remember
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
