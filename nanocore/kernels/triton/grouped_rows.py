"""Rows of a weight of small numbers made numbers of a model's dtype: embeddings, and whole weights.

A value is computed in float32 and rounded once. Rows are independent of each other. For long
prompts a whole weight is worth it: reading it and writing it takes as long as a few hundred tokens
of the product that cuBLAS then does at its own speed.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanocore.kernels.grouped_weight import SUPER_BLOCK
from nanocore.kernels.linear_weight import TokenEmbedding
from nanocore.kernels.torch import linear as torch_linear
from nanocore.kernels.triton.grouped_packing import GroupedLinear, Layout
from nanocore.kernels.triton.launch import pdl, wait_for_inputs

_SUPER_BLOCK: Final = tl.constexpr(SUPER_BLOCK)


def constants(layout: Layout) -> dict[str, Any]:
    """The arguments of kernels that a layout is."""
    return {
        "BITS": layout.bits,
        "PLANE": layout.plane,
        "NUM_SCALES": layout.num_scales,
        "NUM_WORDS": layout.num_words,
        "SCALES": layout.scales,
        "HAS_ZEROS": layout.has_zeros,
        "HAS_MINIMA": layout.has_minima,
        "IS_FLOAT8": layout.is_float8,
    }


@triton.jit
def load_scales(
    scales, super_scales, chunk, columns, num_columns, CHUNK: tl.constexpr, NUM_WORDS: tl.constexpr
) -> tuple:
    """The words of a chunk for these columns; the last is that of super scales."""
    words = ()
    for i in tl.static_range(NUM_WORDS):
        place = (chunk * NUM_WORDS + i) * num_columns + columns
        words = words + (tl.load(scales + place),)  # type: ignore[assignment]  # noqa: RUF005
    if super_scales is not None:
        place = (chunk * CHUNK // _SUPER_BLOCK) * num_columns + columns
        words = words + (tl.load(super_scales + place),)  # type: ignore[assignment]  # noqa: RUF005
    return words


@triton.jit
def _half(word, SHIFT: tl.constexpr) -> tl.tensor:
    """float32 of the float16 that is in one half of a word."""
    return ((word >> SHIFT) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def scale_of(
    words, INDEX: tl.constexpr, SCALES: tl.constexpr, NUM_WORDS: tl.constexpr
) -> tl.tensor:
    """float32, the scale of this number in a chunk."""
    if SCALES == "float32":
        scale = words[INDEX].to(tl.float32, bitcast=True)
    elif SCALES == "super":
        # A signed byte, by way of the word's top.
        number = (words[0] << (24 - 8 * INDEX)) >> 24
        scale = number.to(tl.float32) * _half(words[NUM_WORDS], 0)
    elif SCALES == "float16":
        scale = _half(words[INDEX // 2], 16 * (INDEX % 2))
    else:
        # The upper half of a float32 is a bfloat16.
        scale = ((words[INDEX // 2] >> (16 * (INDEX % 2))) << 16).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def minimum_of(
    words,
    INDEX: tl.constexpr, SCALES: tl.constexpr, NUM_SCALES: tl.constexpr, NUM_WORDS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """float32, what is taken off the scaled numbers."""
    if SCALES == "float32":
        minimum = words[NUM_SCALES + INDEX].to(tl.float32, bitcast=True)
    else:
        number = (words[1] >> (8 * INDEX)) & 0xFF
        minimum = number.to(tl.float32) * _half(words[NUM_WORDS], 16)
    return minimum


@triton.jit
def zero_of(
    words,
    INDEX: tl.constexpr, BITS: tl.constexpr, NUM_WORDS: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """int32, what is taken off the stored numbers."""
    zero = words[0] & 0
    if HAS_ZEROS:
        zero = (words[NUM_WORDS - 1] >> (8 * INDEX)) & 0xFF
    elif not HAS_MINIMA:
        zero += 1 << (BITS - 1)
    return zero


@triton.jit
def _number(
    pairs, zero, SHIFT: tl.constexpr, OFFSET: tl.constexpr, dtype: tl.constexpr
) -> tl.tensor:
    """One half of each pair, less zero, as dtype; OFFSET: what its bits are beside the number."""
    half = (pairs >> SHIFT) & 0xFFFF
    if OFFSET == 0:
        number = (half - zero).to(dtype)
    else:
        # A power of two whose units are those of numbers: all differences are exact.
        number = half.to(tl.uint16).to(dtype, bitcast=True) - (zero + OFFSET).to(dtype)
    return number


@triton.jit
def _float8(pairs, SHIFT: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """One half of each pair of E4M3 as dtype, whose exponents have another bias."""
    half = (pairs >> SHIFT) & 0xFFFF
    sign = (half & 0x80) << 8
    if dtype == tl.bfloat16:
        bits = (sign | ((half & 0x7F) << 4)).to(tl.uint16)
        number = bits.to(tl.bfloat16, bitcast=True) * tl.full((), 2.0**120, tl.bfloat16)
    else:
        bits = (sign | ((half & 0x7F) << 7)).to(tl.uint16)
        number = bits.to(tl.float16, bitcast=True) * tl.full((), 2.0**8, tl.float16)
    return number.to(dtype)


@triton.jit
def numbers_of(
    words, zero,
    INDEX: tl.constexpr, BLOCK_O: tl.constexpr, PLANE: tl.constexpr, BITS: tl.constexpr,
    IS_FLOAT8: tl.constexpr, dtype: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[BLOCK_O, PLANE] in dtype, exactly: one plane of words [BLOCK_O, PLANE / 2] less zeros."""
    # What makes half a word a float16 of 1024 and more, or a bfloat16 of 128 and more.
    OFFSET: tl.constexpr = (
        1024 if dtype == tl.float16 else (128 if dtype == tl.bfloat16 and BITS == 4 else 0)
    )
    if BITS == 4:  # noqa: SIM108
        pairs = (words >> (4 * INDEX)) & 0x000F000F
    else:
        pairs = (words >> (8 * INDEX)) & 0x00FF00FF
    if IS_FLOAT8:
        low, high = _float8(pairs, 0, dtype), _float8(pairs, 16, dtype)
    else:
        if OFFSET == 1024:
            pairs = pairs | 0x64006400
        elif OFFSET == 128:
            pairs = pairs | 0x43004300
        low = _number(pairs, zero[:, None], 0, OFFSET, dtype)
        high = _number(pairs, zero[:, None], 16, OFFSET, dtype)
    return tl.reshape(tl.join(low, high), [BLOCK_O, PLANE])


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
    return _rows(weight, None, 0, 1.0, dtype)


def embed(token_ids_T: Tensor, embedding: TokenEmbedding) -> Tensor:
    weight = embedding.weight
    if not isinstance(weight, GroupedLinear):
        return torch_linear.embedding(token_ids_T, embedding)
    assert weight.permutation_I is None, "an embedding's columns are in order"
    token_ids_T = token_ids_T.contiguous()
    return _rows(weight, token_ids_T, embedding.first_token, embedding.factor, embedding.dtype)


def _rows(
    weight: GroupedLinear, row_ids: Tensor | None, first_row: int, factor: float, dtype: torch.dtype
) -> Tensor:
    num_rows = weight.out_features if row_ids is None else len(row_ids)
    out = torch.empty(num_rows, weight.in_features, dtype=dtype, device=weight.data.device)
    num_chunks = weight.data.shape[1] // (weight.layout.plane // 2)
    if num_rows:
        grouped_rows_kernel[(triton.cdiv(num_rows, BLOCK_R) * num_chunks,)](
            weight.data, weight.scales, weight.super_scales, row_ids, out, num_rows,
            weight.out_features, weight.in_features, num_chunks, first_row, factor,
            BLOCK_R=BLOCK_R, **constants(weight.layout), num_warps=NUM_WARPS, **pdl(out.device),
        )  # fmt: skip
    return out
