"""How a step's decodes are dealt out to programs: the same number of tiles of keys to each.

The tiles of keys that all decodes see, one sequence behind another, are cut into equal spans, one
for each program of a KV head (stream-K: Osama et al. 2023; for attention: Sanovar et al. 2024). A
sequence that lies in several spans is in as many parts. A kernel writes the plan, once a step for
all layers of one window, by lengths that only the device knows. Neither its memory nor any launch
depends on them, so a graph replays it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanocore.kernels.interface import AttentionMetadata
from nanocore.kernels.triton.attention_plan import MERGE, key_tiles, store_merge
from nanocore.kernels.triton.launch import pdl, wait_for_inputs

PART: Final = tl.constexpr(8)
"""Room for the numbers of a part: the sequence; its length; the first tile of keys and the end; the
first part of the sequence, and how many parts it is in."""

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
    seq_lens, seqs, num_seqs, WINDOW: tl.constexpr, TILE: tl.constexpr
) -> tuple:  # fmt: skip
    """(length, first tile, end, weight) of sequences.

    Padding, which has no tile, weighs one: some program is to write its zeros.
    """
    is_seq = seqs < num_seqs
    seq_len = tl.load(seq_lens + seqs, mask=is_seq, other=0)
    first, end = key_tiles(seq_len - 1, 1, WINDOW, TILE)
    return seq_len, first, end, tl.where(is_seq, tl.maximum(end - first, 1), 0)


@triton.jit(
    do_not_specialize=["num_programs", "num_arrivals", "max_merges"],
    # Views of a step's metadata begin anywhere, and a new alignment would be compiled anew.
    do_not_specialize_on_alignment=["seq_lens", "num_decodes"],
)
def decode_plan_kernel(
    seq_lens, num_decodes, parts, first_parts, arrivals, merges,
    num_programs, num_arrivals, max_merges,
    WINDOW: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """parts: [max_parts, PART]. first_parts: [num_programs + 1], where each one's parts begin.

    arrivals: [num_arrivals], which become 0; merges: see `attention_parts.merge_items`; one of them
    is None. Grid: one program, for whom even a thousand sequences are one block.
    """
    wait_for_inputs(PDL)
    num_seqs = tl.load(num_decodes)
    total = 0
    for start in range(0, num_seqs, BLOCK):
        seqs = start + tl.arange(0, BLOCK)
        _, _, _, weight = _load_sequences(seq_lens, seqs, num_seqs, WINDOW, TILE)
        total += tl.sum(weight, axis=0)
    share = tl.maximum(tl.cdiv(total, num_programs), 1)

    num_tiles, num_parts, num_merges = 0, 0, 0
    for start in range(0, num_seqs, BLOCK):
        seqs = start + tl.arange(0, BLOCK)
        seq_len, first, end, weight = _load_sequences(seq_lens, seqs, num_seqs, WINDOW, TILE)
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
            begins = is_part & (cut >= before)  # a program's span, and not only a sequence
            tl.store(first_parts + program + piece, first_part + piece, mask=begins)
        if merges is not None:
            is_split = pieces > 1
            merge = num_merges + tl.cumsum(is_split.to(tl.int32), axis=0) - 1
            store_merge(merges + merge * MERGE, is_split, seqs, 1, first_part, pieces)
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
    """What a plan follows from, beside what is on the device.

    max_seqs: of which there are no more. keys: of a tile. num_programs: of each KV head.
    """

    max_seqs: int
    num_kv_heads: int
    keys: int
    window: int
    num_programs: int


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Plan of a step's decodes, in int32 on the device.

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
        metadata.seq_lens_B, metadata.num_decodes_1, plan.parts_P8, plan.first_parts,
        plan.arrivals_BK, plan.merges_M4, num_programs, decodes.max_seqs * decodes.num_kv_heads,
        decodes.max_seqs, WINDOW=decodes.window, TILE=decodes.keys, BLOCK=block,
        num_warps=1 if block == FEW_BLOCK else 8, **pdl(device),
    )  # fmt: skip
    return plan
