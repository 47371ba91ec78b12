"""RMS norm of rows, alone or of a sum, of all or of some: a program for each row.

A row is read once where it fits registers.

Statistics are float32. The order of rounding is that of `StepKernels.rms_norm`: x / rms(x) to
the weight's dtype, times the weight, to x's dtype; the sum of a residual is rounded to x's dtype
before it is looked at, and takes the residual's place unless rows are selected: one may be selected
twice. Rows are independent of each other. (Zhang and Sennrich 2019.)
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanocore.kernels.triton.launch import pdl, wait_for_inputs

_MAX_BLOCK: Final = 8192
"""Longer rows are read twice, in pieces of this size."""


@triton.jit
def _load_sum(
    x_row, residual_row, columns, mask, IS_SUM: tl.constexpr, KEEPS_SUM: tl.constexpr
) -> tl.tensor:
    """What is to be normed, rounded to x's dtype; a sum is left in residual if it is kept."""
    x = tl.load(x_row + columns, mask=mask, other=0.0)
    if IS_SUM:
        residual = tl.load(residual_row + columns, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        if KEEPS_SUM:
            tl.store(residual_row + columns, x, mask=mask)
    return x.to(tl.float32)


@triton.jit
def _store_normed(out_row, weight, x, inverse, columns, mask) -> None:
    w = tl.load(weight + columns, mask=mask, other=0.0)
    normed = (x * inverse).to(w.dtype)
    # The product of two numbers of the weight's dtype, rounded to it; then to x's.
    product = (normed.to(tl.float32) * w.to(tl.float32)).to(w.dtype)
    tl.store(out_row + columns, product.to(out_row.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["index"])
def rms_norm_kernel(
    x, residual, index, weight, out, eps, x_stride, residual_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_SUM: tl.constexpr, KEEPS_SUM: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """index: which row each program takes; None: its own."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    out_row = out + row * SIZE
    if index is not None:
        row = tl.load(index + row)
    x_row = x + row * x_stride
    residual_row = residual + row * residual_stride
    columns = tl.arange(0, BLOCK)
    if SIZE <= BLOCK:
        mask = columns < SIZE
        values = _load_sum(x_row, residual_row, columns, mask, IS_SUM, KEEPS_SUM)
        inverse = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
        _store_normed(out_row, weight, values, inverse, columns, mask)
    else:
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, SIZE, BLOCK):
            mask = start + columns < SIZE
            values = _load_sum(x_row, residual_row, start + columns, mask, IS_SUM, KEEPS_SUM)
            squares += values * values
        inverse = tl.rsqrt(tl.sum(squares, axis=0) / SIZE + eps)
        tl.debug_barrier()  # a sum may be read back by another thread than wrote it
        for start in range(0, SIZE, BLOCK):
            mask = start + columns < SIZE
            if KEEPS_SUM:
                values = tl.load(residual_row + start + columns, mask=mask, other=0.0)
                values = values.to(tl.float32)
            else:
                values = _load_sum(x_row, residual_row, start + columns, mask, IS_SUM, KEEPS_SUM)
            _store_normed(out_row, weight, values, inverse, start + columns, mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return _norm(rows, None, None, weight, eps).view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _norm(x, residual, None, weight, eps), residual


def select_add_rms_norm(
    x_TE: Tensor, residual_TE: Tensor, index_R: Tensor, weight: Tensor, eps: float
) -> Tensor:
    return _norm(x_TE, residual_TE, index_R, weight, eps)


def launch_options(size: int) -> tuple[int, int]:
    """(BLOCK, num_warps) for rows of this size: 16 bytes for each thread, where that suffices."""
    block = min(triton.next_power_of_2(size), _MAX_BLOCK)
    return block, min(16, max(1, block // 256))


def _norm(
    x: Tensor, residual: Tensor | None, index: Tensor | None, weight: Tensor, eps: float
) -> Tensor:
    size = x.shape[1]
    num_rows = len(x if index is None else index)
    other = x if residual is None else residual
    assert (x.stride(1), other.stride(1)) == (1, 1)
    out = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    block, num_warps = launch_options(size)
    rms_norm_kernel[(num_rows,)](
        x, other, index, weight, out, eps, x.stride(0), other.stride(0),
        SIZE=size, BLOCK=block, IS_SUM=residual is not None,
        KEEPS_SUM=residual is not None and index is None, num_warps=num_warps, **pdl(x.device),
    )  # fmt: skip
    return out
