"""Attention over consecutive tiles of keys, in registers: what decodes and chunks have in common.

Online softmax (Milakov and Gimelshein 2018; FlashAttention: Dao et al. 2022) in powers of two, all
in float32. A score is kept raw until it is exponentiated: one multiply-add then scales it and takes
the peak off, the same with a mask and without, so both give a row the same bits; and a tile that a
row may not see at all leaves its state as it was, bit for bit. Quantized keys and values are
multiplied as they are: scales go on a key's column of scores and of weights. fp8 is exact in
float16, into which it is converted at a third of bfloat16's cost: see `_in_float16` and `_headroom`
for what keeps queries and weights within its range. Shape suffixes: see `interface`.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl


@triton.jit
def block_offset(memory, block, BLOCK_BYTES: tl.constexpr) -> tl.tensor:
    """How far from its beginning these blocks are, in elements.

    block: int64, for a cache may have more than 2**31 elements.
    """
    dtype: tl.constexpr = memory.dtype.element_ty
    return block * (BLOCK_BYTES * 8 // dtype.primitive_bitwidth)


@triton.jit
def locate_keys(table_row, start, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr) -> tuple:
    """(the block, int64, of all keys or of each; a place in it; how far from it each key's is).

    A tile within a block takes one look at the block table, and its distances are constants.
    """
    offsets = tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        block, place = tl.load(table_row + start // BLOCK_SIZE), start % BLOCK_SIZE
        distances = offsets
    else:
        keys = start + offsets
        block, place = tl.load(table_row + keys // BLOCK_SIZE, mask=keys < end, other=0), 0
        distances = keys % BLOCK_SIZE
    return block.to(tl.int64), place, distances


@triton.jit
def key_pointers(memory, located, BLOCK_BYTES: tl.constexpr, SIZE: tl.constexpr) -> tl.tensor:
    """Pointers to keys, [TILE, 1], or with as many columns as there are in memory.

    memory: pointers to a layer's K, V or scales of one head. located: see `locate_keys`. SIZE:
    elements from a key to the next.
    """
    block, place, distances = located
    if len(block.shape) == 0:
        # What is the same for all keys is added up first: 32 bits say the rest.
        first = memory + (block_offset(memory, block, BLOCK_BYTES) + place * SIZE)
        pointers = first + distances[:, None] * SIZE
    else:
        offsets = block_offset(memory, block, BLOCK_BYTES) + distances * SIZE
        pointers = memory + offsets[:, None]
    return pointers


LOG2_E: Final = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_tile(
    values, located, is_stored, head, BLOCK_BYTES: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr, MASKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """K or V of a tile's keys, [TILE, HEAD_DIM_PAD]. located: see `locate_keys`."""
    dims = tl.arange(0, HEAD_DIM_PAD)
    keys = key_pointers(values + head * HEAD_DIM, located, BLOCK_BYTES, KV_HEADS * HEAD_DIM)
    pointers = keys + dims[None, :]
    if MASKED or HEAD_DIM_PAD != HEAD_DIM:
        # What others have stored there may be NaN, which a weight of zero would not remove.
        mask = is_stored[:, None] & (dims < HEAD_DIM)[None, :]
        loaded = tl.load(pointers, mask=mask, other=0.0)
    else:
        loaded = tl.load(pointers)
    return loaded


@triton.jit
def _load_scales(
    k_scale, v_scale, located, is_stored, head, BLOCK_BYTES: tl.constexpr, KV_HEADS: tl.constexpr
) -> tuple:  # fmt: skip
    """(of K, of V) of a tile's keys in float32, each [1, TILE].

    With two columns to spare the tile has an element for each thread, so that each is copied to
    shared memory once. (A smaller one Triton 3.6 has every thread copy that will use it.)
    """
    columns = tl.arange(0, 4)[None, :]
    scales = tl.where(columns == 0, k_scale, v_scale) + head
    pointers = key_pointers(scales, located, BLOCK_BYTES, KV_HEADS)
    loaded = tl.load(pointers, mask=is_stored[:, None] & (columns < 2), other=0.0).to(tl.float32)
    even, odd = tl.split(loaded.reshape(loaded.shape[0], 2, 2))
    return tl.split(even)[0][None, :], tl.split(odd)[0][None, :]


@triton.jit
def _in_float16(q) -> tuple:
    """(q with each row's largest brought to 128 to 256, in float16; what rows are to be multiplied

    by, powers of two). What bfloat16 says is kept down to 2^-24 of a row's largest, and what there
    is below that, in scores sums of which round off as much.
    """
    x = q.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(x), axis=1), 2.0**-60)
    power = largest.to(tl.uint32, bitcast=True) & 0x7F800000
    inverse = (0x82800000 - power).to(tl.float32, bitcast=True)  # exponents: 127 + 7 - (power's)
    return (x * inverse[:, None]).to(tl.float16), (power - 0x03800000).to(tl.float32, bitcast=True)


@triton.jit
def _factors(unit, SCALE: tl.constexpr, SOFTCAP: tl.constexpr) -> tuple:
    """By which scores are multiplied, [rows]: (for a softcap, after it to make powers of two)."""
    to_cap, factor = unit, unit * (SCALE * LOG2_E)
    if SOFTCAP > 0:
        to_cap = unit * (2 * SCALE / SOFTCAP * LOG2_E)
        factor = tl.full(unit.shape, SOFTCAP * LOG2_E, tl.float32)
    return to_cap, factor


@triton.jit
def _headroom(v_scale, visible) -> tl.tensor:
    """Powers of two, [rows] or [1], which the peak is to be above the greatest score, so that no

    weight times a scale exceeds 2^15. By the scales of the keys that a row sees: nothing else may
    change its bits. visible: None if all are seen.
    """
    largest = tl.max(v_scale if visible is None else tl.where(visible, v_scale, 0.0), axis=1)
    exponent = (largest.to(tl.uint32, bitcast=True) >> 23).to(tl.int32) - 127
    # With scales next to nothing the sum of weights would overflow.
    return tl.maximum(exponent - 14, -104).to(tl.float32)


@triton.jit
def _through_registers(x) -> tl.tensor:
    """x, which the compiler cannot see through: it is converted where it was loaded, 16 bytes at

    a time, and then stored for tensor cores. Else they would gather its columns byte by byte.
    """
    even, odd = tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2))
    return tl.join(even, odd).reshape(x.shape)


@triton.jit
def attend(
    acc, peak, total,
    q, positions, first_tile, end_tile,
    k_cache, v_cache, k_scale, v_scale, table_row, seq_len, head,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_BYTES: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
) -> tuple:  # fmt: skip
    """The state after tiles first_tile to end_tile - 1 of one sequence and KV head.

    acc: weighted sums of values, [rows, HEAD_DIM_PAD]. peak: no less than the greatest score so
    far, in powers of two, [rows]; total: the sum of weights. MASKED: False if every row sees all.
    """
    IS_QUANTIZED: tl.constexpr = k_scale is not None
    unit = tl.full(peak.shape, 1.0, tl.float32)
    if q.dtype == tl.bfloat16 and k_cache.dtype.element_ty == tl.float8e4nv:
        q, unit = _in_float16(q)
    to_cap, factor = _factors(unit, SCALE, SOFTCAP)
    for tile in range(first_tile, end_tile):
        keys = tile * TILE + tl.arange(0, TILE)
        is_stored = keys < seq_len
        if MASKED and WINDOW:  # what nobody sees any more is another request's by now
            is_stored &= keys > tl.min(positions, axis=0) - WINDOW
        located = locate_keys(table_row, tile * TILE, seq_len, BLOCK_SIZE, TILE)
        k = _load_tile(
            k_cache, located, is_stored, head, BLOCK_BYTES, KV_HEADS, HEAD_DIM, HEAD_DIM_PAD, MASKED
        ).to(q.dtype)
        raw = tl.dot(q, tl.trans(k), input_precision="ieee")
        if IS_QUANTIZED:
            scales = _load_scales(k_scale, v_scale, located, is_stored, head, BLOCK_BYTES, KV_HEADS)
            raw *= scales[0]
        if SOFTCAP > 0:
            # tanh is 1 - 2 / (1 + e^2x): 1 and -1 where the power overflows and vanishes.
            raw = 1 - 2 / (1 + tl.exp2(raw * to_cap[:, None]))
        visible = None
        if MASKED:
            visible = keys[None, :] <= positions[:, None]
            if WINDOW:
                visible &= keys[None, :] > positions[:, None] - WINDOW
            raw = tl.where(visible, raw, -float("inf"))
        tile_peak = tl.max(raw, axis=1) * factor
        if IS_QUANTIZED and q.dtype == tl.float16:
            tile_peak += _headroom(scales[1], visible)
        new_peak = tl.maximum(peak, tile_peak)
        # A row that has seen nothing has a peak of -inf: its weights are to be 0, not NaN.
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak) if MASKED else new_peak
        weights = tl.exp2(tl.fma(raw, factor[:, None], -base[:, None]))
        decay = tl.exp2(peak - base)
        total = total * decay + tl.sum(weights, axis=1)
        peak = new_peak
        v = _load_tile(
            v_cache, located, is_stored, head, BLOCK_BYTES, KV_HEADS, HEAD_DIM, HEAD_DIM_PAD, MASKED
        ).to(q.dtype)
        if IS_QUANTIZED:
            weights *= scales[1]
            v = _through_registers(v)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(q.dtype), v, acc, input_precision="ieee")
    return acc, peak, total
