"""Attention of decodes: few query tokens for each sequence, all programs with as much to read.

A program takes a sequence's query tokens, mostly one, and their heads of one KV head over a span of
tiles of keys, so that K and V are read once (FlashDecoding: Dao et al. 2023). Reading them is all
that takes time: tiles come through shared memory ahead of use, by as many programs as
multiprocessors hold at once. Where spans begin is up to `plan_decodes`: a span ends within one
sequence and goes on in the next. Of a sequence in parts the program that is done last with one
merges them, always in the same order: it costs a count, where a kernel of its own would cost each
layer a launch. Only few sequences have one. Programs of neighbouring KV heads read neighbouring
memory and so are neighbours in the grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanocore.kernels.attention import AttentionMetadata, AttentionSpec, KVCache
from nanocore.kernels.triton.attention_plan import (
    MERGE,
    MERGE_BLOCK,
    key_tiles,
    merge_items,
    merge_parts,
    store_merge,
    store_sums,
)
from nanocore.kernels.triton.attention_tile import attend
from nanocore.kernels.triton.launch import pdl, wait_for_inputs

PART: Final = tl.constexpr(8)
"""Numbers of a part: the sequence; its length; the first tile of keys and the end; the sequence's
first part, and how many parts it is in; its first query token and how many it has, which are not
there if sequence i has token i alone."""

PLAN_BLOCK: Final = 1024
"""Sequences at once: about as many as there ever are."""

FEW_BLOCK: Final = 32
"""The same of few sequences, which may be in many parts: a turn of the loop over parts is fast."""

FEW_SEQS: Final = 8
"""Up to so many are merged by a kernel of its own: each is in so many parts that one program would
take longer to merge them (on an H100, a step of one sequence: 1.19 ms, and 1.24 ms if it does)."""


@triton.jit
def load_part(parts, part) -> tuple:
    """The numbers of a part, see `PART`."""
    numbers = parts + part * PART
    seq, seq_len = tl.load(numbers), tl.load(numbers + 1)
    first, end = tl.load(numbers + 2), tl.load(numbers + 3)
    return seq, seq_len, first, end, tl.load(numbers + 4), tl.load(numbers + 5)


@triton.jit
def _load_sequences(
    query_start, seq_lens, seqs, num_seqs, WINDOW: tl.constexpr, TILE: tl.constexpr
) -> tuple:  # fmt: skip
    """(first token, tokens, length, first tile, end, weight) of sequences.

    Padding, which has no tile, weighs one: some program is to write its zeros.
    """
    is_seq = seqs < num_seqs
    seq_len = tl.load(seq_lens + seqs, mask=is_seq, other=0)
    token, count = seqs, 1
    if query_start is not None:
        token = tl.load(query_start + seqs, mask=is_seq, other=0)
        count = tl.load(query_start + seqs + 1, mask=is_seq, other=0) - token
    first, end = key_tiles(seq_len - count, count, WINDOW, TILE)
    if query_start is not None:
        end = tl.where(count > 0, end, first)
    weight = tl.where(is_seq, tl.maximum(end - first, 1), 0)
    return token, count, seq_len, first, end, weight


@triton.jit(
    do_not_specialize=["num_programs", "num_arrivals", "max_merges"],
    # Views of a step's metadata begin anywhere, and a new alignment would be compiled anew.
    do_not_specialize_on_alignment=["query_start", "seq_lens", "num_decodes"],
)
def decode_plan_kernel(
    query_start, seq_lens, num_decodes, parts, first_parts, arrivals, merges,
    num_programs, num_arrivals, max_merges,
    WINDOW: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """parts: [max_parts, PART]. first_parts: [num_programs + 1], where each one's parts begin.

    query_start: None if sequence i has token i alone. arrivals: [num_arrivals], which become 0;
    merges: see `merge_items`; one of both is None. Grid: one program.
    """
    wait_for_inputs(PDL)
    num_seqs = tl.load(num_decodes)
    total = 0
    for start in range(0, num_seqs, BLOCK):
        seqs = start + tl.arange(0, BLOCK)
        total += tl.sum(_load_sequences(query_start, seq_lens, seqs, num_seqs, WINDOW, TILE)[5], 0)
    share = tl.maximum(tl.cdiv(total, num_programs), 1)

    num_tiles, num_parts, num_merges = 0, 0, 0
    for start in range(0, num_seqs, BLOCK):
        seqs = start + tl.arange(0, BLOCK)
        token, count, seq_len, first, end, weight = _load_sequences(
            query_start, seq_lens, seqs, num_seqs, WINDOW, TILE
        )
        before = num_tiles + tl.cumsum(weight, axis=0) - weight
        program = before // share
        pieces = tl.where(weight > 0, (before + weight - 1) // share - program + 1, 0)
        first_part = num_parts + tl.cumsum(pieces, axis=0) - pieces
        for piece in range(tl.max(pieces, axis=0)):
            is_part, cut = piece < pieces, (program + piece) * share
            begin = first + tl.maximum(cut - before, 0)
            numbers = parts + (first_part + piece) * PART
            tl.store(numbers, seqs, mask=is_part)
            tl.store(numbers + 1, seq_len, mask=is_part)
            tl.store(numbers + 2, begin, mask=is_part)
            tl.store(numbers + 3, tl.minimum(first + cut + share - before, end), mask=is_part)
            tl.store(numbers + 4, first_part, mask=is_part)
            tl.store(numbers + 5, pieces, mask=is_part)
            if query_start is not None:
                tl.store(numbers + 6, token, mask=is_part)
                tl.store(numbers + 7, count, mask=is_part)
            begins = is_part & (cut >= before)  # a program's span, and not only a sequence
            tl.store(first_parts + program + piece, first_part + piece, mask=begins)
        if merges is not None:
            is_split = pieces > 1
            merge = num_merges + tl.cumsum(is_split.to(tl.int32), axis=0) - 1
            store_merge(merges + merge * MERGE, is_split, token, count, first_part, pieces)
            num_merges += tl.sum(is_split.to(tl.int32), axis=0)
        num_tiles += tl.sum(weight, axis=0)
        num_parts += tl.sum(pieces, axis=0)

    for start in range(tl.cdiv(num_tiles, share), num_programs + 1, BLOCK):
        programs = start + tl.arange(0, BLOCK)
        tl.store(first_parts + programs, num_parts, mask=programs <= num_programs)
    if merges is not None:
        tl.store(merges + max_merges * MERGE, num_merges)
    if arrivals is not None:
        for start in range(0, num_arrivals, BLOCK):
            places = start + tl.arange(0, BLOCK)
            tl.store(arrivals + places, 0, mask=places < num_arrivals)


@dataclass(frozen=True, slots=True)
class Decodes:
    """Host's inputs of a plan, beside what is on the device.

    max_seqs: of which there are no more. keys: of a tile. num_programs: of each KV head.
    """

    max_seqs: int
    num_kv_heads: int
    keys: int
    window: int
    num_programs: int


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """AttentionPlan of a step's decodes, in int32 on the device.

    parts_P8: see `PART`. first_parts: [num_programs + 1], where the parts of a program begin; they
    end where the next one's begin. arrivals_BK: how many parts of a sequence have sums, 0 before
    and after each layer; None if another kernel merges, which merges_M4 is for.
    """

    parts_P8: Tensor
    first_parts: Tensor
    arrivals_BK: Tensor | None
    merges_M4: Tensor | None


def plan_decodes(metadata: AttentionMetadata, decodes: Decodes) -> DecodePlan:
    """The step's plan: enqueued for the first layer that asks, and the same for all others."""
    plan: DecodePlan | None = metadata.scratch.get(decodes)
    if plan is None:
        plan = metadata.scratch[decodes] = _enqueue(metadata, decodes)
    return plan


def _enqueue(metadata: AttentionMetadata, decodes: Decodes) -> DecodePlan:
    """Each end of a span but the last makes one part more than there are sequences, at most."""
    device, num_programs = metadata.seq_lens_B.device, decodes.num_programs

    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int32, device=device)

    is_few = decodes.max_seqs <= FEW_SEQS
    plan = DecodePlan(
        empty(decodes.max_seqs + num_programs, PART.value),
        empty(num_programs + 1),
        None if is_few else empty(decodes.max_seqs, decodes.num_kv_heads),
        empty(decodes.max_seqs + 1, MERGE.value) if is_few else None,
    )
    block = FEW_BLOCK if decodes.max_seqs <= FEW_BLOCK else PLAN_BLOCK
    decode_plan_kernel[(1,)](
        metadata.query_start_A if metadata.decode_tokens > 1 else None,
        metadata.seq_lens_B, metadata.num_decodes_1, plan.parts_P8, plan.first_parts,
        plan.arrivals_BK, plan.merges_M4, num_programs, decodes.max_seqs * decodes.num_kv_heads,
        decodes.max_seqs, WINDOW=decodes.window, TILE=decodes.keys, BLOCK=block,
        num_warps=1 if block == FEW_BLOCK else 8, **pdl(device),
    )  # fmt: skip
    return plan


MIN_DOT_ROWS: Final = 16
"""What tensor cores multiply at least; tokens times heads of a group are padded to it."""


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """Compile-time shape of the kernel. keys: loaded at once, a power of two.

    per_sm: programs that a multiprocessor holds at once.
    """

    keys: int
    num_warps: int
    num_stages: int
    per_sm: int = 1


@triton.jit
def _find_rows(
    parts, part, seq, seq_len, rows, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    QUERIES: tl.constexpr,
) -> tuple:  # fmt: skip
    """(tokens, the first one, of each row: its place among them, head, position, is it one)."""
    if QUERIES == 1:
        count, token, queries, heads = 1, seq, 0, rows
        positions = tl.zeros_like(rows) + (seq_len - 1)
        is_row = heads < GROUP
    else:
        token, count = tl.load(parts + part * PART + 6), tl.load(parts + part * PART + 7)
        queries, heads = rows // GROUP_PAD, rows % GROUP_PAD
        positions = seq_len - count + queries
        is_row = (heads < GROUP) & (queries < count)
    return count, token, queries, heads, positions, is_row


@triton.jit
def _clear_rest(
    out, query_start, num_seqs, num_tokens,
    KV_HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
) -> None:  # fmt: skip
    """Write zeros for tokens that are no sequence's: programs take turns."""
    columns = tl.arange(0, SIZE_PAD)
    first = tl.load(query_start + num_seqs) + tl.program_id(1)
    for token in range(first, num_tokens, tl.num_programs(1)):
        begin = out + (tl.zeros_like(columns).to(tl.int64) + token) * (KV_HEADS * SIZE)
        tl.store(begin + tl.program_id(0) * SIZE + columns, 0.0, mask=columns < SIZE)


@triton.jit
def _merge_if_last(
    arrival, num_parts, sums, log_sums, first_row, part_rows, out, count,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr, MERGED_PARTS: tl.constexpr,
) -> None:  # fmt: skip
    """Count a part whose sums this program has stored, and merge all if it was the last one.

    first_row, part_rows: see `merge_parts`. out: where the rows of the sequence's first token and
    KV head begin. count: of its tokens.
    """
    # All threads have stored before one of them counts. Who counts last sees what all the others
    # stored before they counted: the count releases and acquires.
    tl.debug_barrier()
    num_before = tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu")
    if num_before == num_parts - 1:
        rows, dims = tl.arange(0, GROUP_PAD), tl.arange(0, HEAD_DIM_PAD)
        for query in range(count):
            result = merge_parts(
                sums, log_sums, first_row + query * GROUP, part_rows, num_parts, rows, rows < GROUP,
                HEAD_DIM, HEAD_DIM_PAD, MERGED_PARTS,
            )  # fmt: skip
            mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
            places = rows + query * (KV_HEADS * GROUP)
            pointers = out + places[:, None] * HEAD_DIM + dims[None, :]
            tl.store(pointers, result.to(out.dtype.element_ty), mask=mask)
        tl.store(arrival, 0)  # for the next layer


@triton.jit(
    do_not_specialize=["table_stride", "num_seqs", "num_tokens"],
    # Views of a step's metadata begin anywhere, and a new alignment would be compiled anew.
    do_not_specialize_on_alignment=["block_table", "query_start"],
)
def decode_attention_kernel(
    q, k_cache, v_cache, k_scale, v_scale, out, sums, log_sums, arrivals,
    parts, first_parts, block_table, q_stride, table_stride, query_start, num_seqs, num_tokens,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_BYTES: tl.constexpr, TILE: tl.constexpr,
    MERGED_PARTS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """parts, first_parts, arrivals: see `plan_decodes`. out: [T, H, D].

    QUERIES: the most tokens of a sequence; if 1, sequence i has token i, and query_start, num_seqs
    and num_tokens, of the step with all padding, are None. sums: [max_parts, K, QUERIES GROUP, D],
    and log_sums without D, see `store_sums`. Grid: (KV heads, programs of each).
    """
    wait_for_inputs(PDL)
    head = tl.program_id(0)
    if query_start is not None:
        SIZE_PAD: tl.constexpr = GROUP_PAD * HEAD_DIM_PAD
        _clear_rest(out, query_start, num_seqs, num_tokens, KV_HEADS, GROUP * HEAD_DIM, SIZE_PAD)
    rows, dims = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM_PAD)
    first_part = tl.load(first_parts + tl.program_id(1))
    end_part = tl.load(first_parts + tl.program_id(1) + 1)
    for part in range(first_part, end_part):
        seq, seq_len, first, end, its_first, num_parts = load_part(parts, part)
        count, token, queries, heads, positions, is_row = _find_rows(
            parts, part, seq, seq_len, rows, GROUP, GROUP_PAD, QUERIES
        )
        mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
        columns = token.to(tl.int64) * (KV_HEADS * GROUP * HEAD_DIM) + head * (GROUP * HEAD_DIM)
        q_rows = q + token.to(tl.int64) * q_stride + (head * GROUP + heads) * HEAD_DIM
        q_rows += queries * q_stride
        q_tile = tl.load(q_rows[:, None] + dims[None, :], mask=mask, other=0.0)
        acc, peak, total = attend(
            tl.zeros([ROWS, HEAD_DIM_PAD], tl.float32), tl.full([ROWS], -float("inf"), tl.float32),
            tl.zeros([ROWS], tl.float32), q_tile, positions, first, end,
            k_cache, v_cache, k_scale, v_scale,
            block_table + seq.to(tl.int64) * table_stride, seq_len, head,
            SCALE, WINDOW, SOFTCAP, KV_HEADS, HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE, BLOCK_BYTES, TILE,
            # Masks cost nothing that waiting for memory would not; one loop keeps loads ahead.
            MASKED=True,
        )  # fmt: skip
        if num_parts == 1:
            result = acc / tl.where(total == 0, 1.0, total)[:, None]
            places = queries * (KV_HEADS * GROUP) + heads
            pointers = out + columns + places[:, None] * HEAD_DIM + dims[None, :]
            tl.store(pointers, result.to(out.dtype.element_ty), mask=mask)
        else:
            part_rows, head_row = KV_HEADS * QUERIES * GROUP, head * (QUERIES * GROUP)
            store_sums(
                acc, peak, total, sums, log_sums, part * part_rows + head_row,
                queries * GROUP + heads, is_row, HEAD_DIM, HEAD_DIM_PAD,
            )  # fmt: skip
            if arrivals is not None:
                _merge_if_last(
                    arrivals + seq * KV_HEADS + head, num_parts, sums, log_sums,
                    its_first * part_rows + head_row, part_rows, out + columns, count,
                    KV_HEADS, GROUP, GROUP_PAD, HEAD_DIM, HEAD_DIM_PAD, MERGED_PARTS,
                )  # fmt: skip


def decode_rows(num_tokens: int, group: int) -> int:
    """Rows of a decode's tile: tokens times heads of a group, padded."""
    return max(MIN_DOT_ROWS, triton.next_power_of_2(num_tokens) * triton.next_power_of_2(group))


def decode_attention(
    q_THD: Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    spec: AttentionSpec,
    out_THD: Tensor,
    tiles: DecodeTiles,
    num_programs: int,
) -> None:
    """Write the rows of the decodes; out_THD is contiguous. metadata.num_decodes is above 0.

    If decodes have several tokens, rows of tokens that are no sequence's become zero, too.
    num_programs: of each KV head, see `attention.choose_num_programs`.
    """
    num_heads, head_dim = q_THD.shape[1:]
    block_size, num_kv_heads = cache.k_NSKD.shape[1:3]
    group, table_BM = num_heads // num_kv_heads, metadata.block_table_BM
    group_pad, queries = triton.next_power_of_2(group), metadata.decode_tokens
    starts: tuple[Any, ...] = (None, None, None)
    if queries > 1:
        starts = metadata.query_start_A, len(metadata.seq_lens), len(out_THD)
    plan = plan_decodes(
        metadata, Decodes(metadata.num_decodes, num_kv_heads, tiles.keys, spec.window, num_programs)
    )
    shape, device = (len(plan.parts_P8), num_kv_heads, queries * group), q_THD.device
    sums = torch.empty(*shape, head_dim, dtype=torch.float32, device=device)
    log_sums = torch.empty(shape, dtype=torch.float32, device=device)
    decode_attention_kernel[(num_kv_heads, num_programs)](
        q_THD, cache.k_NSKD, cache.v_NSKD, cache.k_scale_NSK, cache.v_scale_NSK, out_THD,
        sums, log_sums, plan.arrivals_BK, plan.parts_P8, plan.first_parts, table_BM,
        q_THD.stride(0), table_BM.stride(0), *starts,
        SCALE=spec.scale, WINDOW=spec.window, SOFTCAP=spec.softcap,
        KV_HEADS=num_kv_heads, GROUP=group, GROUP_PAD=group_pad, QUERIES=queries,
        ROWS=decode_rows(queries, group),
        HEAD_DIM=head_dim, HEAD_DIM_PAD=triton.next_power_of_2(head_dim),
        BLOCK_SIZE=block_size, BLOCK_BYTES=cache.block_bytes, TILE=tiles.keys,
        MERGED_PARTS=max(2, MERGE_BLOCK // group_pad),
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, **pdl(device),
    )  # fmt: skip
    if plan.merges_M4 is not None:
        merge_items(sums, log_sums, plan.merges_M4, out_THD, num_kv_heads, queries, block_rows=1)
