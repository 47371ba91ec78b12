"""Rows of a weight of small numbers made numbers of a model's dtype: embeddings, and whole weights.

A value is computed in float32 and rounded once. Rows are independent of each other. For long
prompts a whole weight is worth it: reading it and writing it takes as long as a few hundred tokens
of the product that cuBLAS then does at its own speed.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanocore.kernels.linear_weight import TokenEmbedding
from nanocore.kernels.triton.grouped_numbers import (
    constants,
    load_scales,
    minimum_of,
    numbers_of,
    scale_of,
    zero_of,
)
from nanocore.kernels.triton.grouped_packing import GroupedLinear
from nanocore.kernels.triton.launch import pdl, wait_for_inputs

BLOCK_R: Final = 16
"""Rows of a program, whose scales lie side by side if the rows do."""
NUM_WARPS: Final = 4


@triton.jit(do_not_specialize=["num_rows", "first_row"])
def grouped_rows_kernel(
    weight, scales, super_scales, row_ids, out,
    num_rows, num_columns, num_inputs, num_chunks, first_row, factor,
    BLOCK_R: tl.constexpr,
    BITS: tl.constexpr, PLANE: tl.constexpr, NUM_SCALES: tl.constexpr, NUM_WORDS: tl.constexpr,
    SCALES: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_MINIMA: tl.constexpr,
    IS_FLOAT8: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One chunk of inputs of some rows; zeros for ids of which there is no row."""
    wait_for_inputs(PDL)
    PLANES: tl.constexpr = 16 // BITS
    WORDS: tl.constexpr = PLANE // 2
    dtype: tl.constexpr = out.dtype.element_ty
    piece, chunk = tl.program_id(0) // num_chunks, tl.program_id(0) % num_chunks
    rows = (piece * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    is_row, ids = rows < num_rows, rows
    if row_ids is not None:
        ids = tl.load(row_ids + rows, mask=is_row, other=0).to(tl.int64) - first_row
    has_id = (ids >= 0) & (ids < num_columns)
    ids = tl.where(has_id, ids, 0)
    place = ids[:, None] * (num_chunks * WORDS) + chunk * WORDS + tl.arange(0, WORDS)[None, :]
    words = tl.load(weight + place)
    its_scales = load_scales(
        scales, super_scales, chunk, ids, num_columns, PLANES * PLANE, NUM_WORDS
    )
    for n in tl.static_range(PLANES):
        zero = zero_of(its_scales, n * NUM_SCALES // PLANES, BITS, NUM_WORDS, HAS_ZEROS, HAS_MINIMA)
        x = numbers_of(words, zero, n, BLOCK_R, PLANE, BITS, IS_FLOAT8, tl.float32)
        x *= scale_of(its_scales, n * NUM_SCALES // PLANES, SCALES, NUM_WORDS)[:, None]
        if HAS_MINIMA:
            x -= minimum_of(its_scales, n * NUM_SCALES // PLANES, SCALES, NUM_SCALES, NUM_WORDS)[
                :, None
            ]
        x = tl.where(has_id[:, None], x, 0.0)
        x = (x.to(dtype).to(tl.float32) * factor).to(dtype)
        inputs = chunk * PLANES * PLANE + n * PLANE + tl.arange(0, PLANE)
        is_there = is_row[:, None] & (inputs < num_inputs)[None, :]
        tl.store(out + rows[:, None] * num_inputs + inputs[None, :], x, mask=is_there)


def dequantize(weight: GroupedLinear, dtype: torch.dtype) -> Tensor:
    """The whole weight [O, I], its columns in the order in which they are stored."""
    return _rows(weight, None, weight.out_features, 0, 1.0, dtype)


def embed(token_ids_T: Tensor, embedding: TokenEmbedding) -> Tensor:
    """See `interface.Kernels.embedding`."""
    weight = embedding.weight
    assert isinstance(weight, GroupedLinear)
    assert weight.permutation_I is None, "an embedding's columns are in order"
    num_tokens = len(token_ids_T)
    return _rows(
        weight, token_ids_T.contiguous(), num_tokens, embedding.first_token, embedding.factor,
        embedding.dtype,
    )  # fmt: skip


def _rows(
    weight: GroupedLinear,
    row_ids: Tensor | None,
    num_rows: int,
    first_row: int,
    factor: float,
    dtype: torch.dtype,
) -> Tensor:
    out = torch.empty(num_rows, weight.in_features, dtype=dtype, device=weight.data.device)
    num_chunks = weight.data.shape[1] // (weight.layout.plane // 2)
    if num_rows:
        grouped_rows_kernel[(triton.cdiv(num_rows, BLOCK_R) * num_chunks,)](
            weight.data, weight.scales, weight.super_scales, row_ids, out, num_rows,
            weight.out_features, weight.in_features, num_chunks, first_row, factor,
            BLOCK_R=BLOCK_R, **constants(weight.layout), num_warps=NUM_WARPS, **pdl(out.device),
        )  # fmt: skip
    return out
