"""Linear layers with a fixed order of summation, for weights as they are or in int8, gate included.

A program owns a tile of the result and sums over the whole input in order; there is no split of the
input, so a row's bits depend on the tile's shape alone. With `batch_invariant` that is a function
of the weight's shape, and a row gets the same bits in every batch (He et al., Thinking Machines,
2025, on why batches change results). Without it, few rows get narrow tiles, as many as it takes to
keep all multiprocessors reading weights, and many rows get large ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache as remember
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanocore.kernels import Activation
from nanocore.kernels.linear_weight import LinearWeight
from nanocore.kernels.triton.gate import apply_gate
from nanocore.kernels.triton.launch import pdl, wait_for_inputs


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile of the result: block_t rows, block_o columns (of each half, if gated), block_i deep."""

    block_t: int
    block_o: int
    block_i: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, weight_bytes: int, is_gated: bool) -> int:
        """Shared memory that a program may take, for x in half precision; tests compile it.

        Every stage holds a tile of x and one of the weight, two if gated; integers are widened into
        one more. Compilers take up to a stage less where operands come from registers.
        """
        x_numbers = self.block_t * self.block_i
        w_bytes = weight_bytes * self.block_o * self.block_i * (2 if is_gated else 1)
        widened_bytes = w_bytes if weight_bytes == 1 else 0
        return self.num_stages * (2 * x_numbers + w_bytes) + widened_bytes + _BARRIER_BYTES

    def fit(self, weight_bytes: int, is_gated: bool, max_shared_bytes: int) -> Tile:
        """This tile where a program may have so much, or else the next best, of as many rows.

        Shorter rows of the weight are given up first: 128 numbers are still whole sectors of
        memory, and the stages keep as many of them on their way.
        """
        tile = self
        while tile.shared_bytes(weight_bytes, is_gated) > max_shared_bytes:
            if tile.block_i <= 128 and tile.num_stages > 2:
                tile = replace(tile, num_stages=tile.num_stages - 1)
            else:
                tile = replace(tile, block_i=tile.block_i // 2)
        return tile


_BARRIER_BYTES: Final = 64
HOPPER_BYTES: Final = 227 << 10
"""Shared memory of a program from Hopper on, in data centers; the interpreter has as much."""

FLOAT32_TILE: Final = Tile(32, 32, 32, num_warps=4, num_stages=2)
"""Without tensor cores, for small models and tests."""


@triton.jit
def multiply(
    x_rows, is_row, w_rows, up_rows, num_inputs,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, IS_EVEN: tl.constexpr,
    IS_GATED: tl.constexpr,
) -> tuple:  # fmt: skip
    """Rows of x times rows of a weight, and if gated times others; float32 [T, O] each.

    x_rows, w_rows, up_rows: pointers to where rows begin. IS_EVEN: BLOCK_I divides num_inputs.
    """
    i = tl.arange(0, BLOCK_I)
    x_tile = x_rows[:, None] + i[None, :]
    w_tile = w_rows[None, :] + i[:, None]
    up_tile = up_rows[None, :] + i[:, None]
    out = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    up = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    for start in range(0, num_inputs, BLOCK_I):
        if IS_EVEN:
            x = tl.load(x_tile + start, mask=is_row[:, None], other=0.0)
            w = tl.load(w_tile + start)
        else:
            is_input = start + i < num_inputs
            x = tl.load(x_tile + start, mask=is_row[:, None] & is_input[None, :], other=0.0)
            w = tl.load(w_tile + start, mask=is_input[:, None], other=0.0)
        out = tl.dot(x, w.to(x.dtype), out, input_precision="ieee")
        if IS_GATED:
            if IS_EVEN:
                w = tl.load(up_tile + start)
            else:
                w = tl.load(up_tile + start, mask=is_input[:, None], other=0.0)
            up = tl.dot(x, w.to(x.dtype), up, input_precision="ieee")
    return out, up


@triton.jit
def _finish(sums, scale, bias, columns) -> tl.tensor:
    """The sums of these columns scaled and with the bias, in float32."""
    if scale is not None:
        sums = sums * tl.load(scale + columns)[None, :]
    if bias is not None:
        sums = sums + tl.load(bias + columns).to(tl.float32)[None, :]
    return sums


@triton.jit
def _place(num_tiles_t, num_tiles_o) -> tuple:
    """(tile of rows, tile of columns) of this program: eight tiles of rows share what L2 holds."""
    program = tl.program_id(0)
    group = program // (8 * num_tiles_o)
    height = tl.minimum(num_tiles_t - 8 * group, 8)
    within = program % (8 * num_tiles_o)
    return 8 * group + within % height, within // height


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x, weight, scale, bias, out, num_rows, num_columns, num_inputs, x_stride,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, IS_EVEN: tl.constexpr,
    IS_GATED: tl.constexpr, IS_GELU: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    wait_for_inputs(PDL)
    tile_t, tile_o = _place(tl.cdiv(num_rows, BLOCK_T), tl.cdiv(num_columns, BLOCK_O))
    rows = (tile_t * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    columns = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
    is_row, is_column = rows < num_rows, columns < num_columns
    # Columns that are not there repeat the last one and are not stored.
    weight_rows = tl.minimum(columns, num_columns - 1)
    sums, up = multiply(
        x + rows * x_stride, is_row, weight + weight_rows.to(tl.int64) * num_inputs,
        weight + (weight_rows.to(tl.int64) + num_columns) * num_inputs,
        num_inputs, BLOCK_T, BLOCK_O, BLOCK_I, IS_EVEN, IS_GATED,
    )  # fmt: skip
    result = _finish(sums, scale, bias, weight_rows).to(out.dtype.element_ty)
    if IS_GATED:
        up = _finish(up, scale, bias, num_columns + weight_rows).to(out.dtype.element_ty)
        result = apply_gate(result, up, IS_GELU)
    to = out + rows[:, None] * num_columns + columns[None, :]
    tl.store(to, result, mask=is_row[:, None] & is_column[None, :])


@remember
def max_shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have there: 227, 163 or 99 KiB so far."""
    if device.type != "cuda":
        return HOPPER_BYTES
    properties = torch.cuda.get_device_properties(device)
    num_bytes: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return num_bytes


def choose_tile(
    num_rows: int,
    num_columns: int,
    weight_bytes: int,
    is_gated: bool,
    batch_invariant: bool,
    max_shared_bytes: int,
) -> Tile:
    """Choose a tile for half precision. num_columns: of the result; weight_bytes: of a number."""
    if weight_bytes == 1 and max_shared_bytes >= HOPPER_BYTES and not batch_invariant:
        if measured := _measured_tile(num_rows, num_columns, is_gated):
            return measured
    tile = _widest_tile(num_rows, num_columns, weight_bytes, is_gated, batch_invariant)
    return tile.fit(weight_bytes, is_gated, max_shared_bytes)


def _widest_tile(
    num_rows: int, num_columns: int, weight_bytes: int, is_gated: bool, batch_invariant: bool
) -> Tile:
    if batch_invariant:
        # Wide enough for prompts, and no wider than the weight has tiles for its decodes.
        block_o = 64 if num_columns >= 4096 and not is_gated else 32
        return Tile(64, block_o, 128, num_warps=4, num_stages=4)
    if num_rows > 64:
        return Tile(128, 64 if is_gated else 128, 64, num_warps=8, num_stages=3)
    # Bytes in flight are what hides memory's latency: the fewer the tiles, the further ahead each
    # one reads.
    block_t, block_i = max(16, triton.next_power_of_2(num_rows)), 256 // weight_bytes
    if num_columns >= 1 << 14:
        return Tile(block_t, 32 if is_gated else 64, block_i, num_warps=4, num_stages=4)
    if num_columns >= 4096:
        return Tile(block_t, 32, block_i, num_warps=4, num_stages=5)
    return Tile(block_t, 16, 256, num_warps=4, num_stages=5)


def _measured_tile(num_rows: int, num_columns: int, is_gated: bool) -> Tile | None:
    """Tile for integers where an H100 was faster with another one than those below; else None.

    Measured at 1, 32, 64 and 256 rows of Qwen3-0.6B's and 8B's shapes, by benchmarks/gpu's part
    `tiles`; rows in between have the tile of the next larger number. 8B's down projection takes 90
    instead of 150 us at 256 rows, its gated one 44 instead of 93 us at 32 rows.
    """
    if num_rows > 512:
        return None
    if num_rows > 64:
        if is_gated:
            return Tile(128, 64, 64, num_warps=4, num_stages=3)
        if num_columns < 4096:
            return Tile(64, 32, 128, num_warps=4, num_stages=5)
        return Tile(64, 64, 128, num_warps=4, num_stages=4)
    if num_columns < 4096:
        return None
    if is_gated:
        if num_rows <= 16:
            return Tile(16, 32, 256, num_warps=4, num_stages=3)
        block_t = max(32, triton.next_power_of_2(num_rows))
        return Tile(block_t, 64, 128, num_warps=4, num_stages=3)
    if 16 < num_rows <= 32 and num_columns < 1 << 14:
        return Tile(32, 16, 256, num_warps=4, num_stages=5)
    return None


def linear(
    x_TI: Tensor,
    weight: LinearWeight,
    bias_O: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    activation: Activation | None = None,
    *,
    batch_invariant: bool = False,
) -> Tensor:
    """x W^T + b, rounded once to out_dtype, which is x's if not given; [T, O].

    With an activation it is act(first half) * second half of that, [T, O / 2].
    """
    num_rows, num_inputs = x_TI.shape
    is_gated = activation is not None
    num_columns = weight.out_features // 2 if is_gated else weight.out_features
    assert (weight.in_features, x_TI.stride(1)) == (num_inputs, 1)
    assert weight.data.is_contiguous()
    out = torch.empty(num_rows, num_columns, dtype=out_dtype or x_TI.dtype, device=x_TI.device)
    if num_rows == 0:
        return out
    tile = FLOAT32_TILE
    if x_TI.dtype != torch.float32:
        weight_bytes, room = weight.data.element_size(), max_shared_bytes(x_TI.device)
        tile = choose_tile(num_rows, num_columns, weight_bytes, is_gated, batch_invariant, room)
    grid = (triton.cdiv(num_rows, tile.block_t) * triton.cdiv(num_columns, tile.block_o),)
    linear_kernel[grid](
        x_TI, weight.data, weight.scale_O, bias_O, out, num_rows, num_columns, num_inputs,
        x_TI.stride(0), BLOCK_T=tile.block_t, BLOCK_O=tile.block_o, BLOCK_I=tile.block_i,
        IS_EVEN=num_inputs % tile.block_i == 0, IS_GATED=is_gated, IS_GELU=activation == "gelu",
        num_warps=tile.num_warps, num_stages=tile.num_stages, **pdl(x_TI.device),
    )  # fmt: skip
    return out
