"""Mixture of experts as two grouped products, without the host knowing who chose whom.

(Token, choice) pairs are laid out by expert, each expert's in whole tiles of rows, so a program
multiplies rows of one expert (the layout is vLLM's moe_align_block_size; grouped GEMM for experts:
MegaBlocks, Gale et al. 2022). The grid is the most tiles there can be, and those past the last one
end at once. Products read and write rows by pair number: nothing is permuted in memory. A pair's
bits depend on its token and expert alone, and a token sums its choices in their order.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanocore.kernels import Activation
from nanocore.kernels.linear import SharedExpert
from nanocore.kernels.linear_weight import StackedExperts
from nanocore.kernels.triton.gate import apply_gate
from nanocore.kernels.triton.launch import pdl, wait_for_inputs
from nanocore.kernels.triton.matmul import Tile, max_shared_bytes, multiply
from nanocore.kernels.triton.routing import plan

_SUM_BLOCK: Final = 1024
_FLOAT32_TILE: Final = Tile(16, 32, 32, num_warps=4, num_stages=2)
"""Without tensor cores, for small models and tests."""


@triton.jit
def grouped_kernel(
    x, weight, out, pair_of_row, expert_of_tile, num_tiles, num_columns, num_inputs, x_stride,
    PAIRS_PER_ROW: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr, IS_EVEN: tl.constexpr, IS_GATED: tl.constexpr, IS_GELU: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Row pair // PAIRS_PER_ROW of x by the weight of the pair's expert, to row `pair` of out."""
    wait_for_inputs(PDL)
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
        x + pairs // PAIRS_PER_ROW * x_stride, is_row, weight + weight_rows * num_inputs,
        weight + (weight_rows + num_columns) * num_inputs,
        num_inputs, BLOCK_T, BLOCK_O, BLOCK_I, IS_EVEN, IS_GATED,
    )  # fmt: skip
    result = sums.to(out.dtype.element_ty)
    if IS_GATED:
        result = apply_gate(result, up.to(out.dtype.element_ty), IS_GELU)
    to = out + pairs[:, None] * num_columns + columns[None, :]
    tl.store(to, result, mask=is_row[:, None] & (columns < num_columns)[None, :])


@triton.jit
def weighted_sum_kernel(
    y, weights, gate, shared, out, size, gate_stride, shared_stride,
    NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Add each token's chosen rows by their weights, in order, and then the shared expert's.

    Rounded where the reference is, which adds the shared one by itself. shared: None without.
    """
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(NUM_CHOSEN):
        pair = token * NUM_CHOSEN + choice
        weight = tl.load(weights + pair).to(y.dtype.element_ty).to(tl.float32)
        total += weight * tl.load(y + pair * size + columns, mask=mask).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    result = total.to(dtype)
    if shared is not None:
        openness = tl.sigmoid(tl.load(gate + token * gate_stride).to(tl.float32)).to(dtype)
        added = tl.load(shared + token * shared_stride + columns, mask=mask).to(tl.float32)
        added = (openness.to(tl.float32) * added).to(dtype)
        result = (result.to(tl.float32) + added.to(tl.float32)).to(dtype)
    tl.store(out + token * size + columns, result, mask=mask)


def moe(
    x_TE: Tensor,
    experts: StackedExperts,
    expert_ids_TC: Tensor,
    weights_TC: Tensor,
    activation: Activation = "silu",
    shared: SharedExpert | None = None,
    *,
    batch_invariant: bool = False,
) -> Tensor:
    """See `LinearKernels.moe`; experts and weights are those of `route`.

    With batch_invariant the tile does not depend on T.
    """
    num_tokens, hidden = x_TE.shape
    num_experts, _, inner = experts.down_XEI.shape
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
    tiles = plan(expert_ids_TC.contiguous(), num_experts, up_tile.block_t)
    inner_PI, out_PE = x_TE.new_empty(num_pairs, inner), x_TE.new_empty(num_pairs, hidden)
    _multiply_grouped(x_TE, experts.gate_up_XIE, inner_PI, tiles, num_chosen, up_tile, activation)
    _multiply_grouped(inner_PI, experts.down_XEI, out_PE, tiles, 1, down_tile, None)
    gate, added, gate_stride, added_stride = None, None, 1, 1
    if shared is not None:
        gate, added = shared.gate_T1, shared.out_TE
        gate_stride, added_stride = gate.stride(0), added.stride(0)
        assert added.stride(1) == 1
    weighted_sum_kernel[(num_tokens, triton.cdiv(hidden, _SUM_BLOCK))](
        out_PE, weights_TC.contiguous(), gate, added, out, hidden, gate_stride, added_stride,
        NUM_CHOSEN=num_chosen, BLOCK=_SUM_BLOCK, num_warps=4, **pdl(x_TE.device),
    )  # fmt: skip
    return out


def choose_tile(
    num_pairs: int, num_experts: int, is_gated: bool, batch_invariant: bool, max_shared_bytes: int
) -> Tile:
    """Choose a tile for half precision: about as many rows as an expert has on average."""
    halves = 2 if is_gated else 1
    if num_pairs <= 16 * num_experts and not batch_invariant:
        tile = Tile(16, 64 // halves, 128, num_warps=4, num_stages=4)
    elif num_pairs <= 64 * num_experts or batch_invariant:
        tile = Tile(64, 128 // halves, 64, num_warps=4, num_stages=4)
    else:
        tile = Tile(128, 128 // halves, 64, num_warps=8, num_stages=4)
    return tile.fit(2, is_gated, max_shared_bytes)


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
        num_warps=tile.num_warps, num_stages=tile.num_stages, **pdl(x.device),
    )  # fmt: skip
