"""Linear layers whose weights are numbers of 4 or 8 bits in groups, as they were stored.

Activations stay as they are. A group's numbers are multiplied without their scale, so that tensor
cores get operands that nothing was rounded for, and its sum is scaled in float32: what comes out is
the layer of the very weights that the checkpoint means. Sums go over the input in order, and a
row's bits depend on the tile's shape alone; see `matmul`, which batch invariance is explained in.

The weight is the left operand: it is made in registers and never lies in shared memory widened.
Few rows wait for it to be read, so scales are asked for a step ahead. (Kernels that take 4 bits
apart in registers: Marlin, Frantar et al. 2024; magic numbers for it: Kim et al. 2022.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nanocore.kernels import Activation
from nanocore.kernels.triton.gate import apply_gate, gated
from nanocore.kernels.triton.grouped_packing import GroupedLinear, Layout
from nanocore.kernels.triton.grouped_rows import (
    constants,
    dequantize,
    load_scales,
    minimum_of,
    numbers_of,
    scale_of,
    zero_of,
)
from nanocore.kernels.triton.launch import pdl, wait_for_inputs
from nanocore.kernels.triton.matmul import HOPPER_BYTES, max_shared_bytes


@dataclass(frozen=True, slots=True)
class GroupedTile:
    """Tile of the result: block_t rows, block_o columns (of each half, if gated)."""

    block_t: int
    block_o: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, layout: Layout, is_gated: bool) -> int:
        """Shared memory that a program may take, for x in half precision; tests compile it."""
        x_bytes = 2 * self.block_t * layout.chunk
        w_bytes = 2 * self.block_o * layout.plane * (2 if is_gated else 1)
        return max(self.num_stages * (x_bytes + w_bytes) + _BARRIER_BYTES, self._out_bytes())

    def fit(self, layout: Layout, is_gated: bool, max_bytes: int) -> GroupedTile:
        """This tile where a program may have so much, or one that reads less far ahead."""
        tile = self
        while tile.num_stages > 2 and tile.shared_bytes(layout, is_gated) > max_bytes:
            tile = replace(tile, num_stages=tile.num_stages - 1)
        while tile.block_t > 16 and tile.shared_bytes(layout, is_gated) > max_bytes:
            tile = replace(tile, block_t=tile.block_t // 2)
        return tile

    def _out_bytes(self) -> int:
        return 4 * self.block_t * (self.block_o + 8)


_BARRIER_BYTES: Final = 256

FUSED_GATE_ROWS: Final = 16

DEQUANTIZED_ROWS: Final = {False: 512, True: 64}
"""From so many on weights without and with minima are dequantized for cuBLAS, which takes longer
than the product saves below. From an H100's figures for 8B's gate and up at 256 rows: 150 us, 682
us with minima, and 186 us with cuBLAS, of which 96 us do not grow with the rows."""

FLOAT32_TILE: Final = GroupedTile(16, 32, num_warps=4, num_stages=2)
"""Without tensor cores, for small models and tests."""


@triton.jit
def _add_chunk(
    sums, x_tile, is_x, words, scales, start, num_inputs,
    BLOCK_O: tl.constexpr, IS_EVEN: tl.constexpr,
    BITS: tl.constexpr, PLANE: tl.constexpr, NUM_SCALES: tl.constexpr, NUM_WORDS: tl.constexpr,
    SCALES: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINIMA: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """sums [O, T] and the products of a chunk of inputs."""
    PLANES: tl.constexpr = 16 // BITS
    dtype: tl.constexpr = x_tile.dtype.scalar.element_ty
    for n in tl.static_range(PLANES):
        if IS_EVEN:
            x = tl.load(x_tile + (start + n * PLANE), mask=is_x, other=0.0)
        else:
            is_input = start + n * PLANE + tl.arange(0, PLANE) < num_inputs
            x = tl.load(x_tile + (start + n * PLANE), mask=is_x & is_input[:, None], other=0.0)
        zero = zero_of(scales, n * NUM_SCALES // PLANES, BITS, NUM_WORDS, HAS_ZEROS, HAS_MINIMA)
        numbers = numbers_of(words, zero, n, BLOCK_O, PLANE, BITS, IS_FLOAT8, dtype)
        scale = scale_of(scales, n * NUM_SCALES // PLANES, SCALES, NUM_WORDS)
        sums += tl.dot(numbers, x, input_precision="ieee") * scale[:, None]
        if HAS_MINIMA:
            minimum = minimum_of(scales, n * NUM_SCALES // PLANES, SCALES, NUM_SCALES, NUM_WORDS)
            sums -= tl.sum(x.to(tl.float32), axis=0)[None, :] * minimum[:, None]
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def grouped_linear_kernel(
    x, weight, scales, super_scales, bias, out,
    num_rows, num_columns, num_inputs, num_chunks, x_stride,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr,
    IS_EVEN: tl.constexpr, IS_GATED: tl.constexpr, IS_GELU: tl.constexpr,
    BITS: tl.constexpr, PLANE: tl.constexpr, NUM_SCALES: tl.constexpr, NUM_WORDS: tl.constexpr,
    SCALES: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINIMA: tl.constexpr,
    IS_FLOAT8: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    wait_for_inputs(PDL)
    WORDS: tl.constexpr = PLANE // 2
    CHUNK: tl.constexpr = (16 // BITS) * PLANE
    num_outputs = num_columns * (1 + IS_GATED)
    num_tiles_t = tl.cdiv(num_rows, BLOCK_T)  # next to each other: they share a weight's tile
    tile_o, tile_t = tl.program_id(0) // num_tiles_t, tl.program_id(0) % num_tiles_t
    rows = (tile_t * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    columns = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
    is_row, is_column = rows < num_rows, columns < num_columns
    outputs = tl.minimum(columns, num_columns - 1)  # what is not there is not stored either
    row_words, word = num_chunks * WORDS, tl.arange(0, WORDS)
    x_tile = x + rows[None, :] * x_stride + tl.arange(0, PLANE)[:, None]
    w_tile = weight + outputs.to(tl.int64)[:, None] * row_words + word[None, :]
    sums = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    its_scales = load_scales(scales, super_scales, 0, outputs, num_outputs, CHUNK, NUM_WORDS)
    if IS_GATED:
        up_outputs = num_columns + outputs
        up_tile = weight + up_outputs.to(tl.int64)[:, None] * row_words + word[None, :]
        up = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
        up_scales = load_scales(scales, super_scales, 0, up_outputs, num_outputs, CHUNK, NUM_WORDS)
    for chunk in range(0, num_chunks):
        next_chunk = tl.minimum(chunk + 1, num_chunks - 1)
        next_scales = load_scales(
            scales, super_scales, next_chunk, outputs, num_outputs, CHUNK, NUM_WORDS
        )
        words = tl.load(w_tile + chunk * WORDS)
        sums = _add_chunk(
            sums, x_tile, is_row[None, :], words, its_scales, chunk * CHUNK, num_inputs, BLOCK_O,
            IS_EVEN, BITS, PLANE, NUM_SCALES, NUM_WORDS, SCALES, HAS_ZEROS, HAS_MINIMA, IS_FLOAT8,
        )  # fmt: skip
        its_scales = next_scales
        if IS_GATED:
            next_scales = load_scales(
                scales, super_scales, next_chunk, up_outputs, num_outputs, CHUNK, NUM_WORDS
            )
            words = tl.load(up_tile + chunk * WORDS)
            up = _add_chunk(
                up, x_tile, is_row[None, :], words, up_scales, chunk * CHUNK, num_inputs, BLOCK_O,
                IS_EVEN, BITS, PLANE, NUM_SCALES, NUM_WORDS, SCALES, HAS_ZEROS, HAS_MINIMA,
                IS_FLOAT8,
            )  # fmt: skip
            up_scales = next_scales
    if bias is not None:
        sums += tl.load(bias + outputs).to(tl.float32)[:, None]
    result = sums.to(out.dtype.element_ty)
    if IS_GATED:
        if bias is not None:
            up += tl.load(bias + up_outputs).to(tl.float32)[:, None]
        result = apply_gate(result, up.to(out.dtype.element_ty), IS_GELU)
    to = out + rows[None, :] * num_columns + columns[:, None]
    tl.store(to, result, mask=is_row[None, :] & is_column[:, None])


def by_cublas(
    x_TI: Tensor, weight: GroupedLinear, bias_O: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """The same of weights that are rounded to x's dtype."""
    whole_OI = dequantize(weight, x_TI.dtype)
    return F.linear(ordered(x_TI, weight), whole_OI, bias_O).to(out_dtype)


def ordered(x_TI: Tensor, weight: GroupedLinear) -> Tensor:
    """x with its inputs in the order of the weight's columns, and contiguous ones."""
    if weight.permutation_I is not None:
        return x_TI.index_select(1, weight.permutation_I)
    return x_TI


def choose_tile(
    num_rows: int,
    num_columns: int,
    layout: Layout,
    is_gated: bool,
    batch_invariant: bool,
    max_shared_bytes: int,
) -> GroupedTile:
    """Choose the tile for inputs in half precision. num_columns: of the result."""
    if max_shared_bytes >= HOPPER_BYTES and not batch_invariant:
        tile = _measured_tile(num_rows, num_columns, layout, is_gated)
    else:
        tile = _widest_tile(num_rows, num_columns, is_gated, batch_invariant)
    return tile.fit(layout, is_gated, max_shared_bytes)


def _widest_tile(
    num_rows: int, num_columns: int, is_gated: bool, batch_invariant: bool
) -> GroupedTile:
    """What reads weights fastest where shared memory has room.

    A warp has 16 columns at least. The fewer the columns, the narrower the tiles, and the further
    ahead each reads: bytes in flight are what hides memory's latency.
    """
    if batch_invariant:
        # Wide enough for prompts, and no wider than the weight has tiles for its decodes.
        block_o = 64 if num_columns >= 4096 else 32
        return GroupedTile(32, block_o, num_warps=block_o // 16, num_stages=4)
    if num_rows > 64:
        return GroupedTile(64, 128, num_warps=8, num_stages=3)
    block_t = min(max(16, triton.next_power_of_2(num_rows)), 32)
    if num_columns >= 1 << 14 and not is_gated:
        return GroupedTile(block_t, 64, num_warps=4, num_stages=4)
    if num_columns >= 4096:
        return GroupedTile(block_t, 32, num_warps=2, num_stages=5)
    return GroupedTile(block_t, 16, num_warps=1, num_stages=6)


def _measured_tile(num_rows: int, num_columns: int, layout: Layout, is_gated: bool) -> GroupedTile:
    """Tile that an H100 was fastest with, by benchmarks/gpu's part `tiles`.

    Measured at 1, 32 and 256 rows of Qwen3-0.6B's and 8B's shapes, in groups of 32: at 32 rows
    these are up to twice as fast as narrower tiles.
    """
    if num_rows > 64:
        if num_columns < 2048:
            return GroupedTile(32, 64, num_warps=4, num_stages=5)
        if num_columns < 6144:
            return GroupedTile(64, 64, num_warps=4, num_stages=4)
        # Four warps would put registers away where more than a scale goes with the numbers.
        is_plain = layout.plane == 32 and not (layout.has_zeros or layout.has_minima)
        return GroupedTile(64, 128, num_warps=4 if is_plain else 8, num_stages=3)
    if num_rows > 16:
        return GroupedTile(32, 64, num_warps=4, num_stages=4)
    if is_gated:
        return GroupedTile(16, 64, num_warps=4, num_stages=5)
    if num_columns >= 1 << 14:
        return GroupedTile(16, 64, num_warps=4, num_stages=4)
    return GroupedTile(16, 16, num_warps=1, num_stages=6)


def linear(
    x_TI: Tensor,
    weight: GroupedLinear,
    bias_O: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    activation: Activation | None = None,
    *,
    batch_invariant: bool = False,
) -> Tensor:
    """x W^T + b, rounded once to out_dtype, which is x's if not given; [T, O].

    With an activation it is act(first half) * second half of that, [T, O / 2]: one kernel for a few
    rows; for more, both halves would not find room in registers.
    """
    out_dtype, is_gated = out_dtype or x_TI.dtype, activation is not None
    is_fused = len(x_TI) <= FUSED_GATE_ROWS and x_TI.dtype != torch.float32
    if activation is not None and (batch_invariant or not is_fused):
        whole_TO = linear(x_TI, weight, bias_O, out_dtype, batch_invariant=batch_invariant)
        return gated(whole_TO, activation)
    is_many = not is_gated and len(x_TI) >= DEQUANTIZED_ROWS[weight.layout.has_minima]
    if is_many and not batch_invariant and x_TI.is_cuda:
        return by_cublas(x_TI, weight, bias_O, out_dtype)
    num_rows, num_inputs = x_TI.shape
    num_columns = weight.out_features // 2 if is_gated else weight.out_features
    assert weight.in_features == num_inputs
    out = torch.empty(num_rows, num_columns, dtype=out_dtype, device=x_TI.device)
    if num_rows == 0:
        return out
    x_TI = ordered(x_TI, weight)
    assert x_TI.stride(1) == 1
    layout, tile = weight.layout, FLOAT32_TILE
    if x_TI.dtype != torch.float32:
        room = max_shared_bytes(x_TI.device)
        tile = choose_tile(num_rows, num_columns, layout, is_gated, batch_invariant, room)
    grid = (triton.cdiv(num_rows, tile.block_t) * triton.cdiv(num_columns, tile.block_o),)
    grouped_linear_kernel[grid](
        x_TI, weight.data, weight.scales, weight.super_scales, bias_O, out, num_rows, num_columns,
        num_inputs, weight.data.shape[1] // (layout.plane // 2), x_TI.stride(0),
        BLOCK_T=tile.block_t, BLOCK_O=tile.block_o, IS_EVEN=num_inputs % layout.chunk == 0,
        IS_GATED=is_gated, IS_GELU=activation == "gelu", **constants(layout),
        num_warps=tile.num_warps, num_stages=tile.num_stages, **pdl(x_TI.device),
    )  # fmt: skip
    return out
