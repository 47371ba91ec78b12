"""Linear layers in E4M3: each token scaled as it comes, each output feature when it was packed.

A kernel quantizes the tokens, a program for each; the product is torch's scaled one, of cuBLASLt or
CUTLASS, which chooses its algorithm by the number of rows: bits of a row depend on the batch. A
token that is not finite gets a scale of NaN, so that no saturation hides it. Nothing waits for the
device, and all shapes follow from padded sizes. (Micikevicius et al. 2022; scales for each row and
column of a product: vLLM's and torchao's.)
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanocore.kernels.linear_weight import FP8, LinearWeight
from nanocore.kernels.triton.launch import pdl, wait_for_inputs
from nanocore.kernels.triton.norm import launch_options

_LARGEST: Final = tl.constexpr(448.0)
_SMALLEST_SCALE: Final = tl.constexpr(2.0**-126)


@triton.jit
def _round(x) -> tl.tensor:
    """Numbers below 465 rounded half to even to E4M3's, so that converting them changes nothing.

    Triton's interpreter would cut them off, and its compiler for 8.9 round them twice. What is
    added and taken off leaves three bits of a mantissa, and of the smallest numbers as many fewer.
    """
    exponent = tl.maximum((x.to(tl.uint32, bitcast=True) >> 23) & 0xFF, 127 - 6).to(tl.uint32)
    rounder = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
    return (x + rounder) - rounder


@triton.jit
def quantize_tokens_kernel(
    x, values, scales, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
) -> None:
    """Quantize tokens as `linear_weight.quantize_rows` does."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    x_row, values_row = x + row * x_stride, values + row * SIZE
    columns = tl.arange(0, BLOCK)
    numbers = tl.load(x_row + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    largest, oddities = tl.abs(numbers), numbers - numbers  # NaN of what is not finite
    for start in range(BLOCK, SIZE, BLOCK):
        mask = start + columns < SIZE
        more = tl.load(x_row + start + columns, mask=mask, other=0.0).to(tl.float32)
        largest, oddities = tl.maximum(largest, tl.abs(more)), oddities + (more - more)
    amax = tl.max(largest, axis=0) + tl.sum(oddities, axis=0)
    scale = tl.div_rn(amax, tl.full((), _LARGEST, tl.float32))
    scale = tl.where(scale < _SMALLEST_SCALE, _SMALLEST_SCALE, scale)
    tl.store(scales + row, scale)
    divisor = tl.zeros([BLOCK], tl.float32) + scale
    for start in range(0, SIZE, BLOCK):
        mask = start + columns < SIZE
        if SIZE > BLOCK:
            numbers = tl.load(x_row + start + columns, mask=mask, other=0.0).to(tl.float32)
        scaled = _round(tl.div_rn(numbers, divisor))
        tl.store(values_row + start + columns, scaled.to(values.dtype.element_ty), mask=mask)


def quantize_tokens(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """(E4M3 values [T, I], float32 scales [T]); see `linear_weight.quantize_rows`."""
    num_rows, size = x_TI.shape
    assert x_TI.stride(1) == 1
    values_TI = torch.empty(num_rows, size, dtype=FP8, device=x_TI.device)
    scale_T = torch.empty(num_rows, dtype=torch.float32, device=x_TI.device)
    block, num_warps = launch_options(size)
    if num_rows:
        quantize_tokens_kernel[(num_rows,)](
            x_TI, values_TI, scale_T, x_TI.stride(0), SIZE=size, BLOCK=block, num_warps=num_warps,
            **pdl(x_TI.device),
        )  # fmt: skip
    return values_TI, scale_T


def fp8_linear(x_TI: Tensor, weight: LinearWeight, bias_O: Tensor | None = None) -> Tensor:
    """x W^T + b of the rounded x, in x's dtype; [T, O].

    Sums are kept whole (no use_fast_accum). The product takes no bias beside float32 results.
    """
    assert weight.scale_O is not None
    assert weight.data.is_contiguous()
    values_TI, scale_T = quantize_tokens(x_TI)
    adds_bias = x_TI.dtype != torch.float32
    y_TO = torch._scaled_mm(
        values_TI,
        weight.data.t(),
        scale_a=scale_T[:, None],
        scale_b=weight.scale_O[None, :],
        bias=bias_O if adds_bias else None,
        out_dtype=x_TI.dtype,
    )
    return y_TO if bias_O is None or adds_bias else y_TO + bias_O
