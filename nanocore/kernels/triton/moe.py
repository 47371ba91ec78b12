"""Mixture of experts as two grouped products, without the host knowing who chose whom.

(Token, choice) pairs are laid out by expert, each expert's in whole tiles of rows, so a program
multiplies rows of one expert (the layout is vLLM's moe_align_block_size; grouped GEMM for experts:
MegaBlocks, Gale et al. 2022). The grid is the most tiles there can be, and those past the last one
end at once. Products read and write rows by pair number: nothing is permuted in memory. A pair's
bits depend on its token and expert alone, and a token sums its choices in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanocore.kernels.triton.gate import apply_gate
from nanocore.kernels.triton.matmul import Tile, max_shared_bytes, multiply

if TYPE_CHECKING:
    from nanocore.kernels.backend import Activation

_PLAN_BLOCK: Final = 2048
_SUM_BLOCK: Final = 1024
_FLOAT32_TILE: Final = Tile(16, 32, 32, num_warps=4, num_stages=2)
"""Without tensor cores, for small models and tests."""


@triton.jit
def _load_experts(expert_ids, pairs, num_pairs, NUM_EXPERTS: tl.constexpr) -> tl.tensor:
    """Each pair's expert; NUM_EXPERTS for those past the end, and for ids that are none."""
    ids = tl.load(expert_ids + pairs, mask=pairs < num_pairs, other=NUM_EXPERTS)
    return tl.where((ids >= 0) & (ids < NUM_EXPERTS), ids, NUM_EXPERTS).to(tl.int32)


@triton.jit(do_not_specialize=["num_pairs"])
def plan_kernel(
    expert_ids,
    pair_of_row,
    expert_of_tile,
    num_tiles,
    num_pairs,
    NUM_EXPERTS: tl.constexpr,
    NUM_BINS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program for each expert: where its tiles are, and its pairs in order. Filled with -1."""
    expert = tl.program_id(0)
    bins = tl.arange(0, NUM_BINS)
    counts = tl.zeros([NUM_BINS], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        ids = _load_experts(expert_ids, pairs, num_pairs, NUM_EXPERTS)
        counts += tl.histogram(ids, NUM_BINS)
    tiles = tl.where(bins < NUM_EXPERTS, (counts + BLOCK_T - 1) // BLOCK_T, 0)
    first = tl.sum(tl.where(bins < expert, tiles, 0), axis=0)
    own_tiles = tl.sum(tl.where(bins == expert, tiles, 0), axis=0)
    if expert == 0:
        tl.store(num_tiles, tl.sum(tiles, axis=0))

    rows = pair_of_row + first * BLOCK_T
    num_placed = 0
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        is_own = _load_experts(expert_ids, pairs, num_pairs, NUM_EXPERTS) == expert
        ones = is_own.to(tl.int32)
        place = num_placed + tl.cumsum(ones, axis=0) - 1
        tl.store(rows + place, pairs, mask=is_own)
        num_placed += tl.sum(ones, axis=0)
    for tile in range(own_tiles):
        tl.store(expert_of_tile + first + tile, expert)
    rest = num_placed + tl.arange(0, BLOCK_T)
    tl.store(rows + rest, -1, mask=rest < own_tiles * BLOCK_T)


@triton.jit
def grouped_kernel(
    x,
    weight,
    out,
    pair_of_row,
    expert_of_tile,
    num_tiles,
    num_columns,
    num_inputs,
    x_stride,
    PAIRS_PER_ROW: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_GELU: tl.constexpr,
) -> None:
    """Row pair // PAIRS_PER_ROW of x by the weight of the pair's expert, to row `pair` of out."""
    tile_o, tile_t = tl.program_id(0), tl.program_id(1)
    if tile_t >= tl.load(num_tiles):
        return
    expert = tl.load(expert_of_tile + tile_t).to(tl.int64)
    pairs = tl.load(pair_of_row + tile_t * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    is_row = pairs >= 0
    columns = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
    width = 2 * num_columns if IS_GATED else num_columns
    weight_rows = expert * width + tl.minimum(columns, num_columns - 1)
    sums, up = multiply(
        x + pairs // PAIRS_PER_ROW * x_stride,
        is_row,
        weight + weight_rows * num_inputs,
        weight + (weight_rows + num_columns) * num_inputs,
        num_inputs,
        BLOCK_T,
        BLOCK_O,
        BLOCK_I,
        IS_EVEN,
        IS_GATED,
    )
    result = sums.to(out.dtype.element_ty)
    if IS_GATED:
        result = apply_gate(result, up.to(out.dtype.element_ty), IS_GELU)
    to = out + pairs[:, None] * num_columns + columns[None, :]
    tl.store(to, result, mask=is_row[:, None] & (columns < num_columns)[None, :])


@triton.jit
def weighted_sum_kernel(
    y, weights, out, size, NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Of each token the sum of its choices' rows by their weights, in order."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(NUM_CHOSEN):
        pair = token * NUM_CHOSEN + choice
        weight = tl.load(weights + pair).to(y.dtype.element_ty).to(tl.float32)
        total += weight * tl.load(y + pair * size + columns, mask=mask).to(tl.float32)
    tl.store(out + token * size + columns, total.to(out.dtype.element_ty), mask=mask)


def moe(
    x_TE: Tensor,
    gate_up_XIE: Tensor,
    down_XEI: Tensor,
    expert_ids_TC: Tensor,
    weights_TC: Tensor,
    activation: Activation = "silu",
    *,
    batch_invariant: bool = False,
) -> Tensor:
    """See `backend.Kernels.moe`. With batch_invariant the tile does not depend on T."""
    num_tokens, hidden = x_TE.shape
    num_experts, _, inner = down_XEI.shape
    num_chosen = expert_ids_TC.shape[1]
    out = torch.empty(num_tokens, hidden, dtype=x_TE.dtype, device=x_TE.device)
    if num_tokens == 0:
        return out
    num_pairs = num_tokens * num_chosen
    up_tile = down_tile = _FLOAT32_TILE
    if x_TE.dtype != torch.float32:
        up_tile, down_tile = (
            choose_tile(
                num_pairs, num_experts, is_gated, batch_invariant, max_shared_bytes(x_TE.device)
            )
            for is_gated in (True, False)
        )
    plan = _plan(expert_ids_TC.contiguous(), num_experts, up_tile.block_t)
    inner_PI, out_PE = x_TE.new_empty(num_pairs, inner), x_TE.new_empty(num_pairs, hidden)
    _multiply_grouped(x_TE, gate_up_XIE, inner_PI, plan, num_chosen, up_tile, activation)
    _multiply_grouped(inner_PI, down_XEI, out_PE, plan, 1, down_tile, None)
    weighted_sum_kernel[(num_tokens, triton.cdiv(hidden, _SUM_BLOCK))](
        out_PE, weights_TC.contiguous(), out, hidden,
        NUM_CHOSEN=num_chosen, BLOCK=_SUM_BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def choose_tile(
    num_pairs: int,
    num_experts: int,
    is_gated: bool,
    batch_invariant: bool,
    max_shared_bytes: int,
) -> Tile:
    """For inputs in half precision: about as many rows as an expert has on average."""
    halves = 2 if is_gated else 1
    if num_pairs <= 16 * num_experts and not batch_invariant:
        tile = Tile(16, 64 // halves, 128, num_warps=4, num_stages=4)
    elif num_pairs <= 64 * num_experts or batch_invariant:
        tile = Tile(64, 128 // halves, 64, num_warps=4, num_stages=4)
    else:
        tile = Tile(128, 128 // halves, 64, num_warps=8, num_stages=4)
    return tile.fit(2, is_gated, max_shared_bytes)


def _plan(expert_ids_TC: Tensor, num_experts: int, block_t: int) -> tuple[Tensor, Tensor, Tensor]:
    """(pair of each row of the tiles or -1, expert of each tile, how many tiles), int32."""
    num_pairs = expert_ids_TC.numel()
    # Every expert has at most one tile that is not full, and every tile has a pair.
    max_tiles = min(num_pairs // block_t + num_experts, num_pairs)
    pair_of_row, expert_of_tile, num_tiles = (
        expert_ids_TC.new_empty(size, dtype=torch.int32)
        for size in (max_tiles * block_t, max_tiles, 1)
    )
    plan_kernel[(num_experts,)](
        expert_ids_TC, pair_of_row, expert_of_tile, num_tiles, num_pairs, NUM_EXPERTS=num_experts,
        NUM_BINS=triton.next_power_of_2(num_experts + 1), BLOCK_T=block_t, BLOCK=_PLAN_BLOCK,
        num_warps=8,
    )  # fmt: skip
    return pair_of_row, expert_of_tile, num_tiles


def _multiply_grouped(
    x: Tensor,
    weight_XOI: Tensor,
    out: Tensor,
    plan: tuple[Tensor, Tensor, Tensor],
    pairs_per_row: int,
    tile: Tile,
    activation: Activation | None,
) -> None:
    num_columns, num_inputs = out.shape[1], x.shape[1]
    assert x.stride(1) == 1
    assert weight_XOI.is_contiguous()
    max_tiles = len(plan[1])
    grouped_kernel[(triton.cdiv(num_columns, tile.block_o), max_tiles)](
        x, weight_XOI, out, *plan, num_columns, num_inputs, x.stride(0),
        PAIRS_PER_ROW=pairs_per_row, BLOCK_T=tile.block_t, BLOCK_O=tile.block_o,
        BLOCK_I=tile.block_i, IS_EVEN=num_inputs % tile.block_i == 0,
        IS_GATED=activation is not None, IS_GELU=activation == "gelu",
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
