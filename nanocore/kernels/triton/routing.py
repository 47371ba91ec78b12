"""Routing: the experts of each token, and the tokens of each product over experts.

Routing is one kernel, a program for each token: the scores in float32, and the experts of the
greatest one after the other. Of equal ones the smaller number comes first; a token whose logits are
not numbers takes experts that there are, with weights that are not numbers.

The plan lays out (token, choice) pairs by expert, each expert's in whole tiles and in the order of
their numbers. Programs take spans of pairs: where a span's pairs go follows from how many of each
expert are in all of them and in those before, which a kernel of its own counts if there are several
spans. Every place follows from numbers alone; there are no atomics.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanocore.kernels.linear import Routing
from nanocore.kernels.triton.launch import pdl, wait_for_inputs

PLAN_WARPS: Final = 8
MIN_SPAN: Final = 256
MAX_SPANS: Final = 128
NO_KEY: Final = tl.constexpr(-(2**63))  # of what is no expert, or is chosen


@triton.jit
def route_kernel(
    logits, bias, expert_ids, weights, stride, epsilon, factor, NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr, IS_SIGMOID: tl.constexpr, IS_NORMALIZED: tl.constexpr,
    BLOCK: tl.constexpr, CHOSEN_BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """bias: None if there is none."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    is_expert = experts < NUM_EXPERTS
    x = tl.load(logits + token * stride + experts, mask=is_expert, other=float("-inf"))
    x = x.to(tl.float32)
    if IS_SIGMOID:
        scores = tl.div_rn(tl.full([BLOCK], 1.0, tl.float32), 1.0 + tl.exp(-x))
    else:
        powers = tl.exp(x - tl.max(x, axis=0))
        scores = tl.div_rn(powers, tl.sum(powers, axis=0))
    ranked = scores
    if bias is not None:
        ranked = scores + tl.load(bias + experts, mask=is_expert, other=0.0)
    # Bits are in the order of numbers once those of negative ones are reversed; NaN comes first.
    bits = tl.where(ranked == ranked, ranked.to(tl.int32, bitcast=True), 0x7FC00000)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    keys = (bits.to(tl.int64) << 32) | (BLOCK - experts)
    keys = tl.where(is_expert, keys, NO_KEY)
    choices = tl.arange(0, CHOSEN_BLOCK)
    chosen_ids = tl.zeros([CHOSEN_BLOCK], tl.int32)
    chosen = tl.zeros([CHOSEN_BLOCK], tl.float32)
    for choice in range(NUM_CHOSEN):
        best = tl.max(keys, axis=0)
        expert = BLOCK - best.to(tl.int32)
        if bias is None:
            score = (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        else:
            score = tl.sum(tl.where(experts == expert, scores, 0.0), axis=0)
        chosen_ids = tl.where(choices == choice, expert, chosen_ids)
        chosen = tl.where(choices == choice, score, chosen)
        keys = tl.where(keys == best, NO_KEY, keys)
    if IS_NORMALIZED:
        chosen = tl.div_rn(chosen, tl.sum(chosen, axis=0) + epsilon)
    chosen *= factor
    to = token * NUM_CHOSEN + choices
    tl.store(expert_ids + to, chosen_ids, mask=choices < NUM_CHOSEN)
    tl.store(weights + to, chosen, mask=choices < NUM_CHOSEN)


@triton.jit
def load_experts(expert_ids, pairs, end, NUM_EXPERTS: tl.constexpr) -> tl.tensor:
    """Each pair's expert; -1 for those past the end, and for ids that are none."""
    ids = tl.load(expert_ids + pairs, mask=pairs < end, other=-1)
    return tl.where(ids < NUM_EXPERTS, ids, -1).to(tl.int32)


@triton.jit
def _count(
    expert_ids, start, end, NUM_EXPERTS: tl.constexpr, NUM_BINS: tl.constexpr, STEP: tl.constexpr
) -> tl.tensor:
    """How many pairs from start to end - 1 each expert has."""
    bins = tl.arange(0, NUM_BINS)
    counts = tl.zeros([NUM_BINS], tl.int32)
    for first in range(start, end, STEP):
        ids = load_experts(expert_ids, first + tl.arange(0, STEP), end, NUM_EXPERTS)
        counts += tl.sum((ids[:, None] == bins[None, :]).to(tl.int32), axis=0)
    return counts


@triton.jit(do_not_specialize=["num_pairs", "span"])
def count_kernel(
    expert_ids, counts, num_pairs, span, NUM_EXPERTS: tl.constexpr, NUM_BINS: tl.constexpr,
    STEP: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """counts: [spans, NUM_BINS]. Grid: spans of so many pairs."""
    wait_for_inputs(PDL)
    start = tl.program_id(0) * span
    own = _count(
        expert_ids, start, tl.minimum(start + span, num_pairs), NUM_EXPERTS, NUM_BINS, STEP
    )
    tl.store(counts + tl.program_id(0) * NUM_BINS + tl.arange(0, NUM_BINS), own)


@triton.jit(do_not_specialize=["num_pairs", "span", "max_tiles"])
def plan_kernel(
    expert_ids, counts, pair_of_row, expert_of_tile, num_tiles, num_pairs, span, max_tiles,
    NUM_EXPERTS: tl.constexpr, NUM_BINS: tl.constexpr, BLOCK_T: tl.constexpr, STEP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Where the pairs of a span go, and a share of the tiles. counts: None if there is one span."""
    wait_for_inputs(PDL)
    program, num_spans = tl.program_id(0), tl.num_programs(0)
    bins, steps = tl.arange(0, NUM_BINS), tl.arange(0, STEP)
    start = program * span
    end = tl.minimum(start + span, num_pairs)
    total = tl.zeros([NUM_BINS], tl.int32)
    before = tl.zeros([NUM_BINS], tl.int32)
    if counts is None:
        total = _count(expert_ids, start, end, NUM_EXPERTS, NUM_BINS, STEP)
    else:
        for first in range(0, num_spans, 16):
            spans = first + tl.arange(0, 16)
            pointers = counts + spans[:, None] * NUM_BINS + bins[None, :]
            some = tl.load(pointers, mask=(spans < num_spans)[:, None], other=0)
            total += tl.sum(some, axis=0)
            before += tl.sum(tl.where((spans < program)[:, None], some, 0), axis=0)
    tiles = (total + BLOCK_T - 1) // BLOCK_T
    end_tile = tl.cumsum(tiles, axis=0)
    first_tile = end_tile - tiles

    place = first_tile * BLOCK_T + before  # of each expert's next pair
    for first in range(start, end, STEP):
        ids = load_experts(expert_ids, first + steps, end, NUM_EXPERTS)
        is_of = ids[:, None] == bins[None, :]
        is_like_before = (ids[:, None] == ids[None, :]) & (steps[:, None] > steps[None, :])
        rows = tl.sum(tl.where(is_of, place[None, :], 0), axis=1)
        rows += tl.sum(is_like_before.to(tl.int32), axis=1)
        tl.store(pair_of_row + rows, first + steps, mask=ids >= 0)
        place += tl.sum(is_of.to(tl.int32), axis=0)

    for first in range(program * STEP, max_tiles, num_spans * STEP):
        tile = first + steps
        is_of = (first_tile[None, :] <= tile[:, None]) & (tile[:, None] < end_tile[None, :])
        left = total[None, :] - (tile[:, None] - first_tile[None, :]) * BLOCK_T
        num_rows = tl.sum(tl.where(is_of, left, 0), axis=1)
        is_tile = num_rows > 0
        expert = tl.sum(tl.where(is_of, bins[None, :], 0), axis=1)
        tl.store(expert_of_tile + tile, expert, mask=is_tile)
        rows = tl.arange(0, BLOCK_T)
        is_empty = is_tile[:, None] & (rows[None, :] >= num_rows[:, None])
        nobody = tl.full([STEP, BLOCK_T], -1, tl.int32)
        tl.store(pair_of_row + tile[:, None] * BLOCK_T + rows[None, :], nobody, mask=is_empty)
    if program == 0:
        tl.store(num_tiles, tl.sum(tiles, axis=0))


def route(routing: Routing) -> tuple[Tensor, Tensor]:
    """(expert ids, int32 [T, C]; their weights, float32 [T, C]); see `Routing`."""
    logits_TX, num_chosen = routing.logits_TX, routing.num_chosen
    num_tokens, num_experts = logits_TX.shape
    assert logits_TX.stride(1) == 1
    expert_ids_TC = logits_TX.new_empty(num_tokens, num_chosen, dtype=torch.int32)
    weights_TC = logits_TX.new_empty(num_tokens, num_chosen, dtype=torch.float32)
    if num_tokens:
        block = triton.next_power_of_2(num_experts)
        route_kernel[(num_tokens,)](
            logits_TX, routing.bias_X, expert_ids_TC, weights_TC, logits_TX.stride(0),
            routing.epsilon, routing.factor, NUM_EXPERTS=num_experts, NUM_CHOSEN=num_chosen,
            IS_SIGMOID=routing.score == "sigmoid", IS_NORMALIZED=routing.is_normalized,
            BLOCK=block, CHOSEN_BLOCK=triton.next_power_of_2(num_chosen),
            num_warps=route_warps(block), **pdl(logits_TX.device),
        )  # fmt: skip
    return expert_ids_TC, weights_TC


def route_warps(block: int) -> int:
    """Warps that choose among `block` experts: eight experts a thread, 8 warps at most."""
    return min(8, max(1, block // 256))


def plan_step(num_bins: int) -> int:
    """Pairs, or tiles, that a program looks at together: for each of them, every expert."""
    return min(64, max(16, 8192 // num_bins))


def plan(expert_ids_TC: Tensor, num_experts: int, block_t: int) -> tuple[Tensor, Tensor, Tensor]:
    """(pair of each row of the tiles or -1, expert of each tile, how many tiles), int32."""
    num_pairs = expert_ids_TC.numel()
    # Every expert has at most one tile that is not full, and every tile has a pair.
    max_tiles = min(num_pairs // block_t + num_experts, num_pairs)
    pair_of_row, expert_of_tile, num_tiles = (
        expert_ids_TC.new_empty(size, dtype=torch.int32)
        for size in (max_tiles * block_t, max_tiles, 1)
    )
    num_bins = triton.next_power_of_2(num_experts)
    step = plan_step(num_bins)
    span = max(MIN_SPAN, step * triton.cdiv(num_pairs, step * MAX_SPANS))
    num_spans = triton.cdiv(num_pairs, span)
    counts = None
    if num_spans > 1:
        counts = expert_ids_TC.new_empty(num_spans, num_bins, dtype=torch.int32)
        count_kernel[(num_spans,)](
            expert_ids_TC, counts, num_pairs, span, NUM_EXPERTS=num_experts, NUM_BINS=num_bins,
            STEP=step, num_warps=PLAN_WARPS, **pdl(expert_ids_TC.device),
        )  # fmt: skip
    plan_kernel[(num_spans,)](
        expert_ids_TC, counts, pair_of_row, expert_of_tile, num_tiles, num_pairs, span, max_tiles,
        NUM_EXPERTS=num_experts, NUM_BINS=num_bins, BLOCK_T=block_t, STEP=step,
        num_warps=PLAN_WARPS, **pdl(expert_ids_TC.device),
    )  # fmt: skip
    return pair_of_row, expert_of_tile, num_tiles
