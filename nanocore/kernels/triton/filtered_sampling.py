"""Sampling with top_k, top_p and min_p without a sort: candidates are gathered, then searched.

Tokens have levels by how far their logit is below the best one's: 1, 2, 3, ... Programs for each
part of a row count its tokens, and their weights, by level (`survey_kernel`); they find the level
that the filters cannot cut below, and put the tokens down to there together in order of their ids
(`gather_kernel`), if they fit: else the row as it is serves as well. One program then searches the
cuts among them (`choose_kernel`), eight ways at a time, on integers that are ordered as the logits
are, and takes the best kept token with its noise. Sums of weights are float32 within a program's
threads, and in an order that depends on the row alone. (Cuts by search: FlashInfer, Ye et al. 2024,
has it for probabilities.) The rules are those of `sampling.Filters`.

Tokens that a mask forbids are minus infinity, and such tokens are nowhere counted: none is sampled.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanocore.kernels.logit_edits import TokenMask
from nanocore.kernels.sampling import Filters, Noise
from nanocore.kernels.triton.launch import pdl, wait_for_inputs
from nanocore.kernels.triton.sampling import (
    allowed,
    best_of_part_kernel,
    column_or_none,
    first_best,
    gumbel,
    mask_of_row,
    mask_operands,
    noise_key,
)

PART_TOKENS: Final = 2048
BLOCK_TOKENS: Final = 2048
MAX_CANDIDATES: Final = 16384

_NUM_LEVELS = tl.constexpr(16)
_REST = tl.constexpr(14)  # the level of all that is further down
_EXCLUDED = tl.constexpr(15)  # by min_p
_WAYS = tl.constexpr(8)
_LEAST = tl.constexpr(-(2**31))
_ALL = tl.constexpr(2**30)


@triton.jit
def _load_scaled(row, i, mask, heat) -> tl.tensor:
    """Logits by temperature; what is no number is minus infinity."""
    values = tl.div_rn(tl.load(row + i, mask=mask, other=float("-inf")), heat)
    return tl.where(values == values, values, float("-inf"))


@triton.jit
def _gaps(values, best) -> tl.tensor:
    """How far below the best; equals are not, even if infinite."""
    return tl.where(values == best, 0.0, best - values)


@triton.jit
def _max_gap(min_p) -> tl.tensor:
    """Finite: minus infinity is below the best by more."""
    return tl.minimum(tl.maximum(-tl.log(min_p), 0.0), 3.4e38)


@triton.jit
def _keys(values) -> tl.tensor:
    """int32, ordered as the values are; -0.0 is 0.0."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weight_of_key(key, best) -> tl.tensor:
    """exp(value - best), float64, of the value whose key this is (int64)."""
    bits = key.to(tl.int32)
    value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.exp(-_gaps(value, best)).to(tl.float64)


@triton.jit
def _best_of_row(part_best, row, num_parts, heat, PARTS: tl.constexpr) -> tl.tensor:
    parts = tl.arange(0, PARTS)
    mask = parts < num_parts
    return tl.max(_load_scaled(part_best + row * num_parts, parts, mask, heat), axis=0)


@triton.jit
def _levels(values, best, min_p, mask) -> tuple:
    gaps = _gaps(values, best)
    levels = tl.maximum(tl.ceil(tl.minimum(gaps, 15.0)).to(tl.int32) - 1, 0)
    return tl.where(mask & (gaps <= _max_gap(min_p)), levels, _EXCLUDED), gaps


@triton.jit(
    do_not_specialize=["num_columns", "num_words"],
    do_not_specialize_on_alignment=["mask_words", "mask_index"],
)
def survey_kernel(
    logits, mask_words, mask_index, num_words, temperature, top_p, min_p, part_best, part_count,
    part_mass, num_columns, stride,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """How many tokens of this part each level has, and the sum of their weights."""
    wait_for_inputs(PDL)
    row, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    heat = tl.load(temperature + row)
    best = _best_of_row(part_best, row, num_parts, heat, PARTS)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    mask = (mask_words, mask_of_row(mask_index, row), num_words)
    is_token = allowed(mask, columns, columns < num_columns)
    values = _load_scaled(logits + row.to(tl.int64) * stride, columns, is_token, heat)
    levels, gaps = _levels(values, best, tl.load(min_p + row), is_token)
    every = tl.arange(0, _NUM_LEVELS)
    to = (row * num_parts + part) * _NUM_LEVELS + every
    tl.store(part_count + to, tl.histogram(levels, _NUM_LEVELS))
    if tl.load(top_p + row) < 1.0:
        weights = tl.exp(-gaps)
        masses = tl.zeros([_NUM_LEVELS], tl.float32)
        for level in range(_EXCLUDED):
            mass = tl.sum(tl.where(levels == level, weights, 0.0), axis=0)
            masses = tl.where(every == level, mass, masses)
        tl.store(part_mass + to, masses)


@triton.jit
def _last_level(counts, masses, top_k, top_p, min_p) -> tuple:
    """The level that no token is kept below, and the sum of weights of all that pass min_p."""
    every = tl.arange(0, _NUM_LEVELS)
    counts = tl.where(every == _EXCLUDED, 0, counts)
    mass = tl.sum(masses, axis=0)
    has_top_k = tl.cumsum(counts, axis=0) >= top_k
    has_min_p = (every + 1).to(tl.float32) >= _max_gap(min_p)
    # With a top_k that cuts, top_p's share is of a sum that is not known yet.
    is_known = (top_p < 1.0) & (top_k >= tl.sum(counts, axis=0))
    has_top_p = tl.cumsum(masses, axis=0) >= tl.where(is_known, top_p * mass, float("inf"))
    is_enough = has_top_k | has_min_p | has_top_p
    return tl.min(tl.where(is_enough, every, _REST), axis=0), mass


@triton.jit(
    do_not_specialize=["num_columns", "num_words"],
    do_not_specialize_on_alignment=["mask_words", "mask_index"],
)
def gather_kernel(
    logits, mask_words, mask_index, num_words, temperature, top_k, top_p, min_p, part_best,
    part_count, part_mass, candidates, ids, row_count, row_mass, num_columns, stride,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, MAX_CANDIDATES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The tokens of this part down to the last level, to their place among the row's.

    row_count: [R, 2], how many there are, 0 if too many, and how many tokens pass min_p.
    """
    wait_for_inputs(PDL)
    row, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    p, floor = tl.load(top_p + row), tl.load(min_p + row)
    parts, every = tl.arange(0, PARTS), tl.arange(0, _NUM_LEVELS)
    at = (row * num_parts + parts[:, None]) * _NUM_LEVELS + every[None, :]
    count = tl.load(part_count + at, mask=(parts < num_parts)[:, None], other=0)
    num_masses = tl.where(p < 1.0, num_parts, 0)  # of others they are not stored
    mass = tl.load(part_mass + at, mask=(parts < num_masses)[:, None], other=0.0).to(tl.float64)
    totals = tl.sum(count, axis=0)
    last, row_sum = _last_level(totals, tl.sum(mass, axis=0), tl.load(top_k + row), p, floor)
    num_found = tl.sum(tl.where(every <= last, totals, 0), axis=0)
    fits = num_found <= MAX_CANDIDATES
    if part == 0:
        tl.store(row_count + 2 * row, tl.where(fits, num_found, 0))
        tl.store(row_count + 2 * row + 1, tl.sum(tl.where(every < _EXCLUDED, totals, 0), axis=0))
        tl.store(row_mass + row, row_sum)
    if fits:
        is_before = (parts < part)[:, None] & (every <= last)[None, :]
        before = tl.sum(tl.sum(tl.where(is_before, count, 0), axis=1), axis=0)
        heat = tl.load(temperature + row)
        best = _best_of_row(part_best, row, num_parts, heat, PARTS)
        columns = part * BLOCK + tl.arange(0, BLOCK)
        mask = (mask_words, mask_of_row(mask_index, row), num_words)
        is_token = allowed(mask, columns, columns < num_columns)
        logit_row = logits + row.to(tl.int64) * stride
        levels, _ = _levels(_load_scaled(logit_row, columns, is_token, heat), best, floor, is_token)
        is_found = levels <= last
        place = before + tl.cumsum(is_found.to(tl.int32), axis=0) - 1
        to = row.to(tl.int64) * MAX_CANDIDATES + place
        tl.store(candidates + to, tl.load(logit_row + columns, mask=is_found), mask=is_found)
        tl.store(ids + to, columns, mask=is_found)


@triton.jit
def _load_tokens(row, i) -> tuple:
    """(values, keys, gaps, whether they pass min_p and the mask). row: see the next line."""
    tokens, num_tokens, best, heat, max_gap, mask = row
    is_token = allowed(mask, i, i < num_tokens)
    values = _load_scaled(tokens, i, is_token, heat)
    gaps = _gaps(values, best)
    return values, _keys(values), gaps, is_token & (gaps <= max_gap)


@triton.jit
def _search(row, low, target, BLOCK: tl.constexpr, IS_COUNT: tl.constexpr) -> tuple:
    """(the greatest key that the sum of tokens from it on reaches target, the sum of those above).

    The sum is of weights or, with IS_COUNT, of ones; then the search ends early where the sum is
    the target, and the third result says so. low: a key of which it is known.
    """
    num_tokens, best = row[1], row[2]
    ways = tl.arange(0, _WAYS)
    i = tl.arange(0, BLOCK)[None, :]
    high = _keys(best).to(tl.int64) + 1
    above, is_exact = 0.0, False
    while (high - low > 1) & (not is_exact):
        bounds = low + (high - low) * ways // _WAYS
        sums = tl.zeros([_WAYS, BLOCK], tl.float32)
        for start in range(0, num_tokens, BLOCK):
            _, keys, gaps, passes = _load_tokens(row, start + i)
            weights = tl.where(passes, 1.0 if IS_COUNT else tl.exp(-gaps), 0.0)
            sums += tl.where(keys >= bounds.to(tl.int32)[:, None], weights, 0.0)
        sum_from = tl.sum(sums, axis=1)
        is_reached = (sum_from >= target) | (bounds <= low)
        if IS_COUNT:
            is_exact = tl.max((sum_from == target).to(tl.int32), axis=0) > 0
        low = tl.max(tl.where(is_reached, bounds, low), axis=0)
        high = tl.min(tl.where(is_reached, high, bounds), axis=0)
        above = tl.max(tl.where(is_reached, above, sum_from), axis=0)
    return low, above, is_exact


@triton.jit
def _mass_from(row, key, BLOCK: tl.constexpr) -> tl.tensor:
    """The sum of weights of the tokens from a key on, float64."""
    num_tokens = row[1]
    i = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_tokens, BLOCK):
        _, keys, gaps, passes = _load_tokens(row, start + i)
        sums += tl.where(passes & (keys >= key), tl.exp(-gaps), 0.0)
    return tl.sum(sums, axis=0).to(tl.float64)


@triton.jit
def _cut(row, num_passing, mass, k, p, BLOCK: tl.constexpr) -> tuple:
    """(key, ties): kept are the tokens above the key, and of those equal to it the first."""
    best = row[2]
    key = tl.full([], _LEAST, tl.int64)
    ties = tl.full([], _ALL, tl.int32)
    if k < num_passing:
        key, above, is_exact = _search(row, key, k, BLOCK, True)
        if is_exact:
            mass = _mass_from(row, key, BLOCK)
        else:
            ties = k - above.to(tl.int32)
            mass = _mass_from(row, key + 1, BLOCK)
            mass += ties * _weight_of_key(key, best)
    if p < 1.0:
        limit = p.to(tl.float64) * mass
        last, above, _ = _search(row, key, limit, BLOCK, False)
        lacking = (limit - above) / tl.maximum(_weight_of_key(last, best), 1e-300)
        needed = tl.ceil(tl.minimum(tl.maximum(lacking, 1.0), _ALL + 0.0)).to(tl.int32)
        ties = tl.where(last > key, needed, tl.minimum(ties, needed))
        key = last
    return key, ties


@triton.jit(
    do_not_specialize=["num_columns", "num_parts", "num_words"],
    do_not_specialize_on_alignment=["mask_words", "mask_index"],
)
def choose_kernel(
    logits, mask_words, mask_index, num_words, temperature, seed, position, top_k, top_p, min_p,
    part_best, candidates, ids, row_count, row_mass, value, column, num_columns, num_parts, stride,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, MAX_CANDIDATES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    heat = tl.load(temperature + row)
    best = _best_of_row(part_best, row, num_parts, heat, PARTS)
    max_gap = _max_gap(tl.load(min_p + row))
    num_found, num_passing = tl.load(row_count + 2 * row), tl.load(row_count + 2 * row + 1)
    is_whole = num_found == 0
    num_tokens = tl.where(is_whole, num_columns, num_found)
    id_row = ids + row.to(tl.int64) * MAX_CANDIDATES
    tokens = candidates + row.to(tl.int64) * MAX_CANDIDATES
    mask = mask_of_row(mask_index, row)
    if is_whole:
        tokens = logits + row.to(tl.int64) * stride
    else:
        mask = tl.full([], -1, tl.int32)  # it was looked at when they were gathered
    k, p = tl.maximum(tl.load(top_k + row), 1), tl.load(top_p + row)
    mass = tl.load(row_mass + row)
    all_tokens = tokens, num_tokens, best, heat, max_gap, (mask_words, mask, num_words)
    cut, ties = _cut(all_tokens, num_passing, mass, k, p, BLOCK)

    noise = noise_key(tl.load(seed + row), tl.load(position + row))
    chosen, chosen_id, num_ties = float("-inf"), 0, 0
    for start in range(0, num_tokens, BLOCK):
        i = start + tl.arange(0, BLOCK)
        values, keys, _, passes = _load_tokens(all_tokens, i)
        token_ids = tl.load(id_row + i, mask=i < num_found, other=0)
        token_ids = tl.where(is_whole, i, token_ids)
        is_tie = (passes & (keys == cut)).to(tl.int32)
        order = num_ties + tl.cumsum(is_tie, axis=0) - is_tie
        is_kept = passes & ((keys > cut) | ((is_tie > 0) & (order < ties)))
        noisy = tl.where(is_kept, values + gumbel(noise, token_ids), float("-inf"))
        most, most_id = first_best(noisy, token_ids)
        chosen_id = tl.where(most > chosen, most_id, chosen_id)
        chosen = tl.maximum(most, chosen)
        num_ties += tl.sum(is_tie, axis=0)
    parts = tl.arange(0, PARTS)
    is_part = parts < num_parts
    raw = tl.load(part_best + row * num_parts + parts, mask=is_part, other=float("-inf"))
    row_best, _ = first_best(tl.div_rn(raw, heat), parts)
    tl.store(value + row, tl.where(row_best == row_best, chosen, row_best))
    tl.store(column + row, column_or_none(row_best, chosen_id))


def best_filtered_token(
    logits_RV: Tensor, noise: Noise, filters: Filters, mask: TokenMask | None = None
) -> tuple[Tensor, Tensor]:
    num_rows, width = logits_RV.shape
    assert (logits_RV.dtype, logits_RV.stride(1)) == (torch.float32, 1)
    value_R = logits_RV.new_empty(num_rows)
    column_R = logits_RV.new_empty(num_rows, dtype=torch.int64)
    if num_rows == 0:
        return value_R, column_R
    noise, num_parts = noise.contiguous(), triton.cdiv(width, PART_TOKENS)
    k, p, floor = (x.contiguous() for x in (filters.top_k_R, filters.top_p_R, filters.min_p_R))
    heat, stride, grid = noise.temperature_R, logits_RV.stride(0), (num_rows, num_parts)
    masked = logits_RV, *mask_operands(mask)
    part_best = logits_RV.new_empty(num_rows, num_parts)
    part_column = torch.empty_like(part_best, dtype=torch.int32)
    best_of_part_kernel[grid](
        *masked, None, None, None, part_best, part_column, 0, width, stride,
        HAS_NOISE=False, BLOCK=PART_TOKENS, num_warps=4, **pdl(logits_RV.device),
    )  # fmt: skip
    part_count = part_column.new_empty(num_rows, num_parts, _NUM_LEVELS.value)
    part_mass = torch.empty_like(part_count, dtype=torch.float32)
    sizes = {"PARTS": triton.next_power_of_2(num_parts)}
    survey_kernel[grid](
        *masked, heat, p, floor, part_best, part_count, part_mass, width, stride,
        BLOCK=PART_TOKENS, num_warps=4, **sizes, **pdl(logits_RV.device),
    )  # fmt: skip
    sizes["MAX_CANDIDATES"] = MAX_CANDIDATES
    candidates = logits_RV.new_empty(num_rows, MAX_CANDIDATES)
    ids = torch.empty_like(candidates, dtype=torch.int32)
    row_count = ids.new_empty(num_rows, 2)
    row_mass = logits_RV.new_empty(num_rows, dtype=torch.float64)
    gather_kernel[grid](
        *masked, heat, k, p, floor, part_best, part_count, part_mass, candidates, ids, row_count,
        row_mass, width, stride, BLOCK=PART_TOKENS, num_warps=4, **sizes, **pdl(logits_RV.device),
    )  # fmt: skip
    choose_kernel[(num_rows,)](
        *masked, heat, noise.seed_R, noise.position_R, k, p, floor, part_best, candidates, ids,
        row_count, row_mass, value_R, column_R, width, num_parts, stride,
        BLOCK=BLOCK_TOKENS, num_warps=8, **sizes, **pdl(logits_RV.device),
    )  # fmt: skip
    return value_R, column_R
