"""The best token of each row, with Gumbel noise made on the way: logits are read once.

The noise is that of `gumbel_noise`, a hash of (seed, position, token id) with the same integer
bits, and its logarithms differ in rounding only. A row is split over several programs, and a second
kernel takes the best of their results: of equal values the first column. Maxima may or may not see
a value that is not a number, so it is looked for: such a row has no token, as one whose best value
is infinite. The second kernel writes tokens to the token table, too. What a mask forbids is minus
infinity, and its logits are not loaded. Rows are independent of each other.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from msgspec.structs import astuple
from torch import Tensor

from nanocore.kernels.logit_edits import TokenMask
from nanocore.kernels.sampling import Noise, TokenPlaces
from nanocore.kernels.triton.launch import pdl, wait_for_inputs

_PART: Final = 2048
"""Columns of a program: enough to keep loads in flight, few enough that one row fills a GPU."""


@triton.jit
def _mix64(x) -> tl.tensor:
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _mix32(x) -> tl.tensor:
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def noise_key(seed, position) -> tl.tensor:
    """What a row's noise is made of: 64 bits of int64 numbers."""
    return _mix64(_mix64(seed.to(tl.uint64, bitcast=True)) ^ position.to(tl.uint64, bitcast=True))


@triton.jit
def gumbel(key, token_ids) -> tl.tensor:
    """Standard Gumbel noise of these tokens (int32), float32; see `gumbel_noise.gumbel_noise`."""
    ids = token_ids.to(tl.uint32, bitcast=True)
    bits = _mix32((ids * 0x9E3779B9) ^ key.to(tl.uint32))
    bits = _mix32(bits ^ (key >> 32).to(tl.uint32)) >> 1
    uniform = (bits.to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    uniform = tl.minimum(uniform, 0.9999999403953552)  # 1 - 2^-24
    # log(1 - u): what the difference loses is put back by the quotient.
    rest = 1.0 - uniform
    lost = 1.0 - rest
    is_lost = lost == 0.0
    log_rest = tl.log(rest) * (uniform / tl.where(is_lost, 1.0, lost))
    return -tl.log(tl.where(is_lost, uniform, -log_rest))


@triton.jit
def first_best(values, columns) -> tuple:
    """(the greatest value, NaN if one is; the smallest of its columns)."""
    is_number = values == values
    best = tl.max(tl.where(is_number, values, float("-inf")), axis=0)
    column = tl.min(tl.where(values == best, columns, 0x7FFFFFFF), axis=0)
    has_nan = tl.max((~is_number).to(tl.int32), axis=0) > 0
    return tl.where(has_nan, float("nan"), best), column


@triton.jit
def column_or_none(best, column) -> tl.tensor:
    """int64; -1 (`candidates.NO_TOKEN`) where the best value is not finite."""
    return tl.where(tl.abs(best) < float("inf"), column.to(tl.int64), -1)


@triton.jit
def mask_of_row(index, row) -> tl.tensor:
    """Index of a row's mask, -1 for none. index: what `mask_operands` made.

    The caller builds the tuple for `allowed`. Triton 3.6 cannot return a tuple that holds None,
    which `mask_operands` makes of no masks; later versions can.
    """
    return -1 if index is None else tl.load(index + row)


@triton.jit
def allowed(mask, token_ids, is_token) -> tl.tensor:
    """Whether a row's mask, if it has one, allows each of these tokens (int32).

    mask: (mask_words, mask_of_row(...), num_words).
    """
    words, index, num_words = mask
    if words is not None:
        word = words + index.to(tl.int64) * num_words + token_ids // 32
        # Not is_token & (index >= 0): Triton 3.9's interpreter makes int32 of such a scalar.
        bits = tl.load(word, mask=tl.where(is_token, index, -1) >= 0, other=-1)
        is_token = is_token & (((bits >> (token_ids % 32)) & 1) != 0)
    return is_token


@triton.jit(
    do_not_specialize=["first_token", "num_columns", "num_words"],
    do_not_specialize_on_alignment=["mask_words", "mask_index"],
)
def best_of_part_kernel(
    logits, mask_words, mask_index, num_words, temperature, seed, position, part_value, part_column,
    first_token, num_columns, stride,
    HAS_NOISE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    wait_for_inputs(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_columns
    mask = (mask_words, mask_of_row(mask_index, row), num_words)
    is_column = allowed(mask, first_token + columns, is_column)
    logit_row = logits + row.to(tl.int64) * stride
    values = tl.load(logit_row + columns, mask=is_column, other=float("-inf")).to(tl.float32)
    if HAS_NOISE:
        heat = tl.load(temperature + row)
        if heat != 0.0:
            key = noise_key(tl.load(seed + row), tl.load(position + row))
            values = tl.div_rn(values, heat) + gumbel(key, first_token + columns)
    best, column = first_best(values, columns)
    to = row * tl.num_programs(1) + part
    tl.store(part_value + to, best)
    tl.store(part_column + to, column)


@triton.jit(do_not_specialize=["num_parts"], do_not_specialize_on_alignment=["rows", "positions"])
def best_of_parts_kernel(
    part_value, part_column, value, column, token_table, rows, positions, num_parts, token_stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """token_table: None if the columns are to go nowhere else."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    parts = tl.arange(0, BLOCK)
    is_part = parts < num_parts
    values = tl.load(part_value + row * num_parts + parts, mask=is_part, other=float("-inf"))
    columns = tl.load(part_column + row * num_parts + parts, mask=is_part, other=0x7FFFFFFF)
    best, first = first_best(values, columns)
    chosen = column_or_none(best, first)
    tl.store(value + row, best)
    tl.store(column + row, chosen)
    if token_table is not None:
        place = tl.load(rows + row) * token_stride + tl.load(positions + row)
        tl.store(token_table + place, chosen.to(tl.int32))


def mask_operands(mask: TokenMask | None) -> tuple[Tensor | None, Tensor | None, int]:
    """(words, index, words of a mask) as kernels take them."""
    if mask is None:
        return None, None, 0
    assert mask.words_MW.is_contiguous()
    assert mask.index_R.is_contiguous()
    return mask.words_MW, mask.index_R, mask.words_MW.shape[1]


def best_token(
    logits_RV: Tensor,
    first_token: int,
    noise: Noise | None = None,
    places: TokenPlaces | None = None,
    mask: TokenMask | None = None,
) -> tuple[Tensor, Tensor]:
    num_rows, width = logits_RV.shape
    assert logits_RV.stride(1) == 1
    num_parts = triton.cdiv(width, _PART)
    device = logits_RV.device
    part_value = torch.empty(num_rows, num_parts, device=device)
    part_column = torch.empty(num_rows, num_parts, dtype=torch.int32, device=device)
    value_R = torch.empty(num_rows, device=device)
    column_R = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return value_R, column_R
    drawn = (None, None, None) if noise is None else astuple(noise.contiguous())
    best_of_part_kernel[(num_rows, num_parts)](
        logits_RV, *mask_operands(mask), *drawn, part_value, part_column, first_token, width,
        logits_RV.stride(0), HAS_NOISE=noise is not None, BLOCK=_PART, num_warps=4,
        **pdl(logits_RV.device),
    )  # fmt: skip
    table, token_stride = (None, None, None), 1
    if places is not None:
        assert places.token_table.stride(1) == 1
        table, token_stride = astuple(places), places.token_table.stride(0)
    best_of_parts_kernel[(num_rows,)](
        part_value, part_column, value_R, column_R, *table, num_parts, token_stride,
        BLOCK=triton.next_power_of_2(num_parts), num_warps=1, **pdl(logits_RV.device),
    )  # fmt: skip
    return value_R, column_R
