"""What programs leave of their rows: results, or sums of parts and then their mean.

Only items that were split have sums, in memory for as many as there can be. The parts of an item
lie one after another and are merged in that order (FlashDecoding: Dao et al. 2023), each weighted
by the sum of its weights. Shape suffixes: see `interface`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanocore.kernels.triton.attention_plan import MERGE, Plan
from nanocore.kernels.triton.launch import pdl, wait_for_inputs

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


@dataclass(frozen=True, slots=True)
class PartSums:
    """Memory of a launch for its parts; None if no item can be split."""

    sums: Tensor | None
    log_sums: Tensor | None

    @classmethod
    def allocate(cls, plan: Plan, num_kv_heads: int, num_rows: int, out_THD: Tensor) -> PartSums:
        """For items of num_rows rows in each KV head."""
        if plan.merges_M4 is None:
            return cls(None, None)
        shape, device = (plan.num_sums, num_kv_heads, num_rows), out_THD.device
        sums = torch.empty(*shape, out_THD.shape[2], dtype=torch.float32, device=device)
        return cls(sums, torch.empty(shape, dtype=torch.float32, device=device))


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
