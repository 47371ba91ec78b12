"""How attention of chunks is dealt out to programs, by lengths that only the device knows.

An item is a tile of queries of a chunk. It sees so many tiles of keys; one that sees more than its
share of all that is seen is split into parts, spans of its tiles, so that one long context does not
keep the step waiting. A kernel writes the plan, once a step for all layers of one window: which
program has which part. Neither its memory nor any launch depends on lengths, so a graph replays it.
A part's bits follow from the item and from where it is split; with one share nothing ever is, and a
token's bits depend on its own sequence alone. Decodes have a plan of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanocore.kernels.attention import AttentionMetadata
from nanocore.kernels.triton.launch import pdl, wait_for_inputs

PART: Final = tl.constexpr(8)
"""Numbers of a part: the first query's token; how many queries, 0 if there is no such part; the
first one's position, negative in padding; the sequence; its length; its first tile of keys and its
end; where its sums go, or -1 if it is all of its item."""

MERGE: Final = tl.constexpr(4)
"""Numbers of an item in parts: its first token; queries; where sums begin; how many parts."""

PLAN_BLOCK: Final = 1024
"""Items at once: about as many as there ever are."""


@triton.jit
def load_part(parts, part) -> tuple:
    """The numbers of a part, see `PART`."""
    numbers = parts + part * PART
    token, count, position = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    seq, seq_len = tl.load(numbers + 3), tl.load(numbers + 4)
    first, end, sum_id = tl.load(numbers + 5), tl.load(numbers + 6), tl.load(numbers + 7)
    return token, count, position, seq, seq_len, first, end, sum_id


@triton.jit
def _find_sequences(query_start, items, first_seq, num_seqs, QUERIES: tl.constexpr) -> tuple:
    """(sequence, the how many-th of its tiles of queries) of each item; perhaps past its last.

    Tiles of sequence i begin where its tokens would, in tiles, if each one before it left a tile
    unfinished. The search is for the last sequence that begins no later than the item.
    """
    origin = tl.load(query_start + first_seq)
    low, high = tl.zeros_like(items) + first_seq, tl.zeros_like(items) + num_seqs
    span = num_seqs - first_seq
    while span > 1:
        middle = (low + high) // 2
        begin = (tl.load(query_start + middle) - origin) // QUERIES + middle - first_seq
        low = tl.where(begin <= items, middle, low)
        high = tl.where(begin <= items, high, middle)
        span = (span + 1) // 2
    begin = (tl.load(query_start + low) - origin) // QUERIES + low - first_seq
    return low, items - begin


@triton.jit
def _find_items(
    query_start, seq_lens, items, num_items, first_seq, num_seqs, QUERIES: tl.constexpr
) -> tuple:
    """The first five numbers of these items' parts, see `PART`. QUERIES: see the kernel."""
    is_item = items < num_items
    seq, tile = _find_sequences(query_start, items, first_seq, num_seqs, QUERIES)
    begin = tl.load(query_start + seq, mask=is_item, other=0)
    num_queries = tl.load(query_start + seq + 1, mask=is_item, other=0) - begin
    token = begin + tile * QUERIES
    count = tl.maximum(tl.minimum(num_queries - tile * QUERIES, QUERIES), 0)
    seq_len = tl.load(seq_lens + seq, mask=is_item, other=0)
    position = seq_len - num_queries + tile * QUERIES
    return token, count, position, seq, seq_len


@triton.jit
def key_tiles(position, count, WINDOW: tl.constexpr, TILE: tl.constexpr) -> tuple:
    """(first, end) of the tiles of keys that queries from a position on see; none in padding."""
    first = tl.zeros_like(position)
    if WINDOW:
        first = tl.maximum(position - WINDOW + 1, 0) // TILE
    return first, tl.cdiv(tl.maximum(position + count, 0), TILE)


@triton.jit
def _store_part(
    numbers, mask, token, count, position, seq, seq_len, first, end, sum_id
) -> None:  # fmt: skip
    """Write the numbers of a part, see `PART`."""
    tl.store(numbers, token, mask=mask)
    tl.store(numbers + 1, count, mask=mask)
    tl.store(numbers + 2, position, mask=mask)
    tl.store(numbers + 3, seq, mask=mask)
    tl.store(numbers + 4, seq_len, mask=mask)
    tl.store(numbers + 5, first, mask=mask)
    tl.store(numbers + 6, end, mask=mask)
    tl.store(numbers + 7, sum_id, mask=mask)


@triton.jit
def store_merge(numbers, mask, token, count, sum_id, num_parts) -> None:
    """Write the numbers of an item in parts, see `MERGE`."""
    tl.store(numbers, token, mask=mask)
    tl.store(numbers + 1, count, mask=mask)
    tl.store(numbers + 2, sum_id, mask=mask)
    tl.store(numbers + 3, num_parts, mask=mask)


@triton.jit(
    do_not_specialize=["num_seqs", "num_shares", "min_tiles", "max_parts", "max_merges"],
    # Views of a step's metadata begin anywhere, and a new alignment would be compiled anew.
    do_not_specialize_on_alignment=["query_start", "seq_lens", "num_decodes"],
)
def attention_plan_kernel(
    query_start, seq_lens, num_decodes, parts, merges,
    num_seqs, num_shares, min_tiles, max_parts, max_merges, QUERIES: tl.constexpr,
    WINDOW: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """parts: [max_parts, PART], those of items that are split first, for they take longest; then
    none; then whole items, of which the last, with the most keys of a chunk, come first.
    merges: [max_merges + 1, MERGE], None if num_shares is 1; how many there are is in the last row.
    QUERIES: tokens of an item. num_decodes: how many sequences are no chunks; None: none. Grid: one
    program, for whom even a thousand sequences are one or two blocks.
    """
    wait_for_inputs(PDL)
    first_seq = 0 if num_decodes is None else tl.load(num_decodes)
    num_tokens = tl.load(query_start + num_seqs) - tl.load(query_start + first_seq)
    num_items = num_tokens // QUERIES + num_seqs - first_seq
    total = 0
    for start in range(0, num_items, BLOCK):
        items = start + tl.arange(0, BLOCK)
        _, count, position, _, _ = _find_items(
            query_start, seq_lens, items, num_items, first_seq, num_seqs, QUERIES
        )
        first, end = key_tiles(position, count, WINDOW, TILE)
        total += tl.sum(tl.where(count > 0, end - first, 0), axis=0)
    share = tl.maximum(tl.cdiv(total, num_shares), min_tiles)

    num_sums, num_whole, num_merges = 0, 0, 0
    for start in range(0, num_items, BLOCK):
        items = start + tl.arange(0, BLOCK)
        token, count, position, seq, seq_len = _find_items(
            query_start, seq_lens, items, num_items, first_seq, num_seqs, QUERIES
        )
        first, end = key_tiles(position, count, WINDOW, TILE)
        size = end - first
        # To the nearest: a few programs too few cost less than parts for all of a large batch.
        pieces = tl.where(count > 0, tl.maximum((size + share // 2) // share, 1), 0)
        is_split, whole = pieces > 1, (pieces == 1).to(tl.int32)
        summed = tl.where(is_split, pieces, 0)
        sum_id = num_sums + tl.cumsum(summed, axis=0) - summed
        rest = max_parts - (num_whole + tl.cumsum(whole, axis=0))
        for piece in range(tl.max(pieces, axis=0)):
            begin = first + size * piece // tl.maximum(pieces, 1)
            until = first + size * (piece + 1) // tl.maximum(pieces, 1)
            _store_part(
                parts + tl.where(is_split, sum_id + piece, rest) * PART, piece < pieces,
                token, count, position, seq, seq_len, begin, until,
                tl.where(is_split, sum_id + piece, -1),
            )  # fmt: skip
        if merges is not None:
            merge = num_merges + tl.cumsum(is_split.to(tl.int32), axis=0) - 1
            store_merge(merges + merge * MERGE, is_split, token, count, sum_id, pieces)
            num_merges += tl.sum(is_split.to(tl.int32), axis=0)
        num_sums += tl.sum(summed, axis=0)
        num_whole += tl.sum(whole, axis=0)

    for start in range(num_sums, max_parts - num_whole, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        tl.store(parts + 1 + rows * PART, 0, mask=rows < max_parts - num_whole)
    if merges is not None:
        tl.store(merges + max_merges * MERGE, num_merges)


@dataclass(frozen=True, slots=True)
class Items:
    """Host's inputs of a plan, beside what is on the device.

    queries: tokens of a tile of chunks. keys: of a tile. has_decodes: whether
    sequences that decode are among the chunks. max_items: of which there are no more. num_shares:
    how many equal shares there are of all tiles of keys that are seen, of min_tiles or more. An
    item is split into as many parts as are nearest to the shares it has: more and smaller ones were
    slower (on an H100), for items of one chunk then do not read the same keys at the same time.
    """

    queries: int
    keys: int
    window: int
    has_decodes: bool
    max_items: int
    block_size: int
    num_shares: int
    min_tiles: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """AttentionPlan of a step's chunks, in int32 on the device.

    parts_P8: see `PART`. merges_M4: see `merge_items`; None if nothing can be
    split. num_sums: the most sums of parts that there can be.
    """

    parts_P8: Tensor
    merges_M4: Tensor | None
    num_sums: int


def plan_step(metadata: AttentionMetadata, items: Items) -> AttentionPlan:
    """The step's plan: enqueued for the first layer that asks, and the same for all others."""
    plan: AttentionPlan | None = metadata.scratch.get(items)
    if plan is None:
        plan = metadata.scratch[items] = _enqueue(metadata, items)
    return plan


def _enqueue(metadata: AttentionMetadata, items: Items) -> AttentionPlan:
    """An item in parts has more than one of the shares, and more of them than it has parts beyond
    the first: so there are fewer such items than shares, and fewer such parts.
    """
    max_tiles = triton.cdiv(metadata.block_table_BM.shape[1] * items.block_size, items.keys)
    if items.window:
        # So many keys from the first query's first one on, which may be a tile's last.
        num_keys = items.window + items.queries - 1
        max_tiles = min(max_tiles, triton.cdiv(num_keys - 1, items.keys) + 1)
    num_shares = items.num_shares if max_tiles > items.min_tiles else 1
    max_splits = num_shares - 1
    max_parts, max_merges = items.max_items + max_splits, min(items.max_items, max_splits)
    device = metadata.seq_lens_B.device
    parts_P8 = torch.empty(max_parts, PART.value, dtype=torch.int32, device=device)
    merges_M4 = None
    if max_splits:
        merges_M4 = torch.empty(max_merges + 1, MERGE.value, dtype=torch.int32, device=device)
    attention_plan_kernel[(1,)](
        metadata.query_start_A, metadata.seq_lens_B,
        None if items.has_decodes else metadata.num_decodes_1, parts_P8, merges_M4,
        len(metadata.seq_lens), num_shares, items.min_tiles, max_parts, max_merges,
        QUERIES=items.queries, WINDOW=items.window, TILE=items.keys, BLOCK=PLAN_BLOCK, num_warps=8,
        **pdl(device),
    )  # fmt: skip
    return AttentionPlan(parts_P8, merges_M4, max_merges + max_splits)


MERGE_BLOCK: Final = 32
"""Rows times parts that are loaded at once."""

_MAX_MERGING: Final = 8
"""Programs of each block of rows that merge items: mostly there are none to merge, and programs
that find nothing to do are to be few."""


@triton.jit
def store_sums(
    acc, peak, total, sums, log_sums, first_row, rows, is_row,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr,
) -> None:  # fmt: skip
    """Means of a part, and log2 of the sums of their weights, to these rows from first_row on.

    acc, peak, total: as `attend` leaves them. sums: [rows, D], log_sums: [rows], both float32.
    """
    dims = tl.arange(0, HEAD_DIM_PAD)
    places = first_row + rows
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    total = tl.where(total == 0, 1.0, total)
    pointers = sums + places.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(pointers, acc / total[:, None], mask=mask)
    tl.store(log_sums + places, peak + tl.log2(total), mask=is_row)


@triton.jit
def merge_parts(
    sums, log_sums, first_row, part_rows, num_parts, rows, is_row,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr, BLOCK_PARTS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The means of parts, [rows, HEAD_DIM_PAD], in their order; see `store_sums`.

    first_row: of the first part's. part_rows: from a part's to the next one's.
    """
    dims = tl.arange(0, HEAD_DIM_PAD)
    is_dim = dims < HEAD_DIM
    acc = tl.zeros([rows.shape[0], HEAD_DIM_PAD], tl.float32)
    peak = tl.full([rows.shape[0]], -float("inf"), tl.float32)
    total = tl.zeros([rows.shape[0]], tl.float32)
    for start in range(0, num_parts, BLOCK_PARTS):
        parts = start + tl.arange(0, BLOCK_PARTS)
        places = first_row + parts[:, None] * part_rows + rows[None, :]
        mask = (parts < num_parts)[:, None] & is_row[None, :]
        log_sum = tl.load(log_sums + places, mask=mask, other=-float("inf"))
        values = tl.load(
            sums + places.to(tl.int64)[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=mask[:, :, None] & is_dim[None, None, :], other=0.0,
        )  # fmt: skip
        new_peak = tl.maximum(peak, tl.max(log_sum, axis=0))
        # Parts may hold nothing that a row sees: their weight is to be 0, not NaN.
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        weights, decay = tl.exp2(log_sum - base[None, :]), tl.exp2(peak - base)
        acc = acc * decay[:, None] + tl.sum(values * weights[:, :, None], axis=0)
        total = total * decay + tl.sum(weights, axis=0)
        peak = new_peak
    return acc / tl.where(total == 0, 1.0, total)[:, None]


@triton.jit
def store_rows(
    acc, peak, total, out, sums, log_sums, token, sum_id, head, queries, heads, is_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr,
) -> None:  # fmt: skip
    """Rows as `attend` leaves them, of query token + queries and of these heads of the group.

    out: [T, H, D]. sums: [num_sums, K, QUERIES * GROUP, D], and log_sums without D, see
    `store_sums`; None if no item can be split.
    """
    dims = tl.arange(0, HEAD_DIM_PAD)
    if sum_id < 0:
        result = acc / tl.where(total == 0, 1.0, total)[:, None]
        tile = out + token.to(tl.int64) * (KV_HEADS * GROUP * HEAD_DIM)
        rows = (queries * KV_HEADS + head) * GROUP + heads
        pointers = tile + rows[:, None] * HEAD_DIM + dims[None, :]
        mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(pointers, result.to(out.dtype.element_ty), mask=mask)
    elif sums is not None:
        first_row = (sum_id * KV_HEADS + head) * (QUERIES * GROUP)
        rows = queries * GROUP + heads
        store_sums(
            acc, peak, total, sums, log_sums, first_row, rows, is_row, HEAD_DIM, HEAD_DIM_PAD
        )


@triton.jit(do_not_specialize=["max_merges"])
def merge_parts_kernel(
    sums, log_sums, merges, out, max_merges,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_PARTS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The means of items that are split. merges: see `merge_items`.

    Grid: (KV heads times blocks of rows, programs that share the items).
    """
    wait_for_inputs(PDL)
    head, block = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS
    rows, dims = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS), tl.arange(0, HEAD_DIM_PAD)
    columns = (rows // GROUP * KV_HEADS + head) * GROUP + rows % GROUP
    num_merges = tl.load(merges + max_merges * MERGE)
    for merge in range(tl.program_id(1), num_merges, tl.num_programs(1)):
        numbers = merges + merge * MERGE
        token, count = tl.load(numbers), tl.load(numbers + 1)
        sum_id, num_parts = tl.load(numbers + 2), tl.load(numbers + 3)
        is_row = rows < count * GROUP
        part_rows = KV_HEADS * QUERIES * GROUP
        first_row = sum_id * part_rows + head * (QUERIES * GROUP)
        if block * BLOCK_ROWS < count * GROUP:
            result = merge_parts(
                sums, log_sums, first_row, part_rows, num_parts, rows, is_row,
                HEAD_DIM, HEAD_DIM_PAD, BLOCK_PARTS,
            )  # fmt: skip
            tile = out + token.to(tl.int64) * (KV_HEADS * GROUP * HEAD_DIM)
            pointers = tile + columns[:, None] * HEAD_DIM + dims[None, :]
            mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
            tl.store(pointers, result.to(out.dtype.element_ty), mask=mask)


def merge_items(
    sums: Tensor,
    log_sums: Tensor,
    merges_M4: Tensor,
    out_THD: Tensor,
    num_kv_heads: int,
    num_queries: int,
    block_rows: int,
) -> None:
    """Write the rows of items in parts. block_rows: of a program, a power of two.

    merges_M4: int32, of each item the numbers of `MERGE`; how many items in the last row.
    """
    num_heads, head_dim = out_THD.shape[1:]
    group, max_merges = num_heads // num_kv_heads, len(merges_M4) - 1
    num_blocks = triton.cdiv(num_queries * group, block_rows)
    merge_parts_kernel[(num_kv_heads * num_blocks, min(_MAX_MERGING, max_merges))](
        sums, log_sums, merges_M4, out_THD, max_merges,
        KV_HEADS=num_kv_heads, GROUP=group, QUERIES=num_queries,
        HEAD_DIM=head_dim, HEAD_DIM_PAD=triton.next_power_of_2(head_dim),
        BLOCK_ROWS=block_rows, BLOCK_PARTS=MERGE_BLOCK // block_rows, num_warps=4,
        **pdl(out_THD.device),
    )  # fmt: skip
