"""Attention over consecutive tiles of keys, in registers: what decodes and chunks have in common.

Online softmax (Milakov and Gimelshein 2018; FlashAttention: Dao et al. 2022) in powers of two, all
in float32. A score is kept raw until it is exponentiated: one multiply-add then scales it and takes
the peak off, the same with a mask and without, so both give a row the same bits; and a tile that a
row may not see at all leaves its state as it was, bit for bit. Quantized keys and values are
multiplied as they are: scales go on a key's column of scores and of weights. Shape suffixes: see
`backend`.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

LOG2_E: Final = tl.constexpr(1.4426950408889634)


@triton.jit
def _locate_keys(table_row, start, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr) -> tuple:
    """(a slot, int64; how far from it each key's is). Slots are block * BLOCK_SIZE + place in it.

    A tile within a block takes one look at the block table, and its distances are constants.
    """
    offsets = tl.arange(0, TILE)
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(table_row + start // BLOCK_SIZE).to(tl.int64)
        slot, distances = block * BLOCK_SIZE + start % BLOCK_SIZE, offsets
    else:
        keys = start + offsets
        blocks = tl.load(table_row + keys // BLOCK_SIZE, mask=keys < end, other=0).to(tl.int64)
        slot, distances = tl.full([], 0, tl.int64), blocks * BLOCK_SIZE + keys % BLOCK_SIZE
    return slot, distances


@triton.jit
def _load_tile(
    values, slot, distances, is_stored, head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """K or V of a tile's keys, [TILE, HEAD_DIM_PAD]."""
    dims = tl.arange(0, HEAD_DIM_PAD)
    # A cache may have more than 2**31 elements: the slot is int64.
    tile = values + (slot * KV_HEADS + head) * HEAD_DIM
    pointers = tile + distances[:, None] * (KV_HEADS * HEAD_DIM) + dims[None, :]
    if MASKED or HEAD_DIM_PAD != HEAD_DIM:
        # What was never stored may be NaN, which a weight of zero would not remove.
        mask = is_stored[:, None] & (dims < HEAD_DIM)[None, :]
        loaded = tl.load(pointers, mask=mask, other=0.0)
    else:
        loaded = tl.load(pointers)
    return loaded


@triton.jit
def _load_scales(
    scales, slot, distances, is_stored, head, KV_HEADS: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Of a tile's keys, [1, TILE]."""
    pointers = scales + (slot * KV_HEADS + head) + distances * KV_HEADS
    return tl.load(pointers, mask=is_stored, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _capped(scores, SCALE: tl.constexpr, SOFTCAP: tl.constexpr) -> tl.tensor:
    """tanh(scores * SCALE / SOFTCAP), or scores as they are without a softcap."""
    if SOFTCAP > 0:
        # 1 - 2 / (1 + e^2x), which is 1 and -1 where the power overflows and vanishes.
        scores = 1 - 2 / (1 + tl.exp2(scores * (2 * SCALE / SOFTCAP * LOG2_E)))
    return scores


@triton.jit
def attend(
    acc, peak, total,
    q, positions, first_tile, end_tile,
    k_cache, v_cache, k_scale, v_scale, table_row, seq_len, head,
    SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
) -> tuple:  # fmt: skip
    """The state after tiles first_tile to end_tile - 1 of one sequence and KV head.

    acc: weighted sums of values, [rows, HEAD_DIM_PAD]. peak: the greatest score so far, in powers
    of two, [rows]; total: the sum of weights, [rows]. MASKED: False if every row sees all of it.
    """
    FACTOR: tl.constexpr = (SOFTCAP if SOFTCAP > 0 else SCALE) * LOG2_E
    for tile in range(first_tile, end_tile):
        start = tile * TILE
        keys = start + tl.arange(0, TILE)
        is_stored = keys < seq_len
        slot, distances = _locate_keys(table_row, start, seq_len, BLOCK_SIZE, TILE)
        k = _load_tile(
            k_cache, slot, distances, is_stored, head, KV_HEADS, HEAD_DIM, HEAD_DIM_PAD, MASKED
        )
        v = _load_tile(
            v_cache, slot, distances, is_stored, head, KV_HEADS, HEAD_DIM, HEAD_DIM_PAD, MASKED
        )
        raw = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if k_scale is not None:
            raw *= _load_scales(k_scale, slot, distances, is_stored, head, KV_HEADS)
        raw = _capped(raw, SCALE, SOFTCAP)
        if MASKED:
            visible = keys[None, :] <= positions[:, None]
            if WINDOW:
                visible &= keys[None, :] > positions[:, None] - WINDOW
            raw = tl.where(visible, raw, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(raw, axis=1) * FACTOR)
        # A row that has seen nothing yet has a peak of -inf: its weights are to be 0, not NaN.
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak) if MASKED else new_peak
        weights = tl.exp2(tl.fma(raw, FACTOR, -base[:, None]))
        decay = tl.exp2(peak - base)
        total = total * decay + tl.sum(weights, axis=1)
        peak = new_peak
        if v_scale is not None:
            weights *= _load_scales(v_scale, slot, distances, is_stored, head, KV_HEADS)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
    return acc, peak, total
