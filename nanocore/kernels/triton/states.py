"""Layers that carry a state from token to token: a program for some channels of a sequence.

A convolution runs over the sequence's tokens in tiles, and then writes the states that the step
leaves behind, the last one first: the state that it began with lies in the first of their blocks,
or in none. A delta rule keeps its matrix in registers, and writes it as it goes.

A token's result has the same bits however its sequence is cut into steps: nothing is summed over
tokens, and sums over keys have one order.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanocore.kernels.attention import AttentionMetadata
from nanocore.kernels.states import ConvFilters, DeltaRule, StateCache
from nanocore.kernels.triton.launch import pdl, wait_for_inputs

CONV_TILES: Final = (1, 512), (16, 64)
"""(tokens, channels) at a time, where each sequence has one token, and elsewhere."""
DELTA_WARPS: Final = 1
"""Then sums over keys need no barrier."""
DELTA_REGISTERS: Final = 255
"""Limit for each thread. Of itself ptxas sets a lower one, and then q and k are loaded in turns."""
_MATRIX_PART: Final = 2048
"""Numbers of a matrix that a program holds: 64 registers of each thread."""
_BLOCK: Final = 1024
_SIZES: Final = ["num_seqs", "num_tokens", "table_stride"]
_STEP: Final = [
    "block_table", "query_start", "seq_lens", "rows_b", "num_right", "num_drafts"
]  # fmt: skip
"""Views of a step's metadata begin anywhere, and a new alignment would be compiled anew."""
EPS: Final = tl.constexpr(1e-6)
"""Added to the squared length of q and of k."""


@triton.jit
def _load_seq(
    query_start, seq_lens, num_seqs, num_tokens, rows_b, num_right, num_drafts, row_stride, seq
) -> tuple:
    """(where in the step its tokens would begin with its drafts before them; where these are; how
    many; tokens and drafts; tokens that the state before them has; those of the state it leaves).

    Drafts: those of the last step that were right. The tokens behind the last sequence are those of
    one that has length 0, as padding has.
    """
    is_seq, start = seq < num_seqs, tl.load(query_start + seq)
    count = tl.load(query_start + seq + 1, mask=is_seq, other=num_tokens) - start
    last = tl.load(seq_lens + seq, mask=is_seq, other=0)
    row, behind, drafted = 0, 0, 0
    if rows_b is not None:
        row = tl.load(rows_b + seq, mask=last > 0, other=0) * row_stride
        behind = tl.load(num_right + seq, mask=last > 0, other=0)
        drafted = tl.load(num_drafts + seq, mask=last > 0, other=0)
    begin = (start - behind).to(tl.int64)
    return begin, row, behind, behind + count, last - count - behind, last - drafted


@triton.jit
def _find_state(states, table, num_tokens, block_stride, BLOCK_SIZE: tl.constexpr) -> tuple:
    """(the state after so many tokens, its block's id)."""
    block_id = tl.load(table + tl.maximum(num_tokens - 1, 0) // BLOCK_SIZE)
    return states + tl.maximum(block_id, 0).to(tl.int64) * block_stride, block_id


@triton.jit
def _find_inputs(x, x_stride, begin, numbers, kept, COLUMN: tl.constexpr) -> tl.tensor:
    """Where inputs of a sequence's tokens are, the first ones among its drafts."""
    drafts, row, draft_stride, behind = kept
    rows = x + (begin + numbers) * x_stride
    if drafts is not None:
        rows = tl.where(numbers < behind, drafts + row + numbers * draft_stride + COLUMN, rows)
    return rows


@triton.jit
def _conv_input(
    x, x_stride, begin, numbers, kept, first, before, channels, mask, CHANNELS, TAPS,
    HAS_PRODUCTS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The filter's input of a sequence's tokens, or what the state before has of earlier ones."""
    row, is_own = _find_inputs(x, x_stride, begin, numbers, kept, 0) + channels, numbers >= 0
    value = tl.load(row, mask=mask & is_own, other=0.0)
    if HAS_PRODUCTS:
        u = tl.load(row + 2 * CHANNELS, mask=mask & is_own, other=0.0)
        value = (value.to(tl.float32) * u.to(tl.float32)).to(value.dtype)
    mask &= (numbers < 0) & (first + numbers >= 0)
    column = before + (numbers + TAPS - 1) * CHANNELS + channels
    return tl.where(is_own, value, tl.load(column, mask=mask, other=0.0).to(value.dtype))


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_STEP)
def short_conv_kernel(
    x, weight, bias, states, block_table, query_start, seq_lens, num_seqs, num_tokens, drafts,
    rows_b, num_right, num_drafts, row_stride, draft_stride, out, x_stride, table_stride,
    block_stride, CHANNELS: tl.constexpr, TAPS: tl.constexpr, TAPS_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HAS_PRODUCTS: tl.constexpr, TILE_T: tl.constexpr,
    TILE_C: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Some channels of a sequence. Grid: (tiles of channels, sequences, and one for padding)."""
    wait_for_inputs(PDL)
    seq = tl.program_id(1).to(tl.int64)
    begin, row, behind, count, first, last = _load_seq(
        query_start, seq_lens, num_seqs, num_tokens, rows_b, num_right, num_drafts, row_stride, seq
    )
    channels = tl.program_id(0) * TILE_C + tl.arange(0, TILE_C)[None, :]
    is_channel = channels < CHANNELS
    if (last == 0) | (count == 0):
        for i in range(count):
            tl.store(out + (begin + i) * CHANNELS + channels, 0.0, mask=is_channel)
        return
    table, kept = block_table + seq * table_stride, (drafts, row, draft_stride, behind)
    before, _ = _find_state(states, table, first, block_stride, BLOCK_SIZE)
    for tile in range(0, count, TILE_T):
        numbers = tile + tl.arange(0, TILE_T)[:, None]
        mask = is_channel & (numbers < count)
        total = tl.zeros((TILE_T, TILE_C), tl.float32)
        if bias is not None:
            total += tl.load(bias + channels, mask=is_channel, other=0.0)
        for tap in tl.static_range(TAPS):
            value = _conv_input(
                x, x_stride, begin, numbers - (TAPS - 1 - tap), kept, first, before, channels, mask,
                CHANNELS, TAPS, HAS_PRODUCTS,
            )  # fmt: skip
            of_tap = tl.load(weight + tap * CHANNELS + channels, mask=is_channel, other=0.0)
            total += value.to(tl.float32) * of_tap
        result = total.to(x.dtype.element_ty).to(tl.float32)
        rows, mask = begin + numbers, mask & (numbers >= behind)
        if HAS_PRODUCTS:
            c = tl.load(x + rows * x_stride + CHANNELS + channels, mask=mask, other=0.0)
            result *= c.to(tl.float32)
        else:
            result *= tl.sigmoid(result)
        tl.store(out + rows * CHANNELS + channels, result.to(out.dtype.element_ty), mask=mask)
    num_blocks, columns = tl.cdiv(last, BLOCK_SIZE), tl.arange(0, TAPS_PAD)[:, None]
    for i in range(num_blocks - first // BLOCK_SIZE):
        end = tl.minimum((num_blocks - i) * BLOCK_SIZE, last)
        to, block_id = _find_state(states, table, end, block_stride, BLOCK_SIZE)
        mask = tl.where(is_channel & (columns < TAPS - 1), block_id, -1) >= 0
        value = _conv_input(
            x, x_stride, begin, end - first - (TAPS - 1) + columns, kept, first, before, channels,
            mask, CHANNELS, TAPS, HAS_PRODUCTS,
        )  # fmt: skip
        tl.debug_barrier()  # the state before may be overwritten, by other threads than read it
        tl.store(to + columns * CHANNELS + channels, value.to(states.dtype.element_ty), mask=mask)


@triton.jit
def _load_token(
    inputs, begin, number, kept, key_head, head, keys, values, KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
) -> tuple:  # fmt: skip
    """q, k, v, b and a of a token's value head, as they are stored."""
    qkv, qkv_stride, gates, gate_stride = inputs
    SIZE: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    row = _find_inputs(qkv, qkv_stride, begin, number, kept, 0)
    b = _find_inputs(gates, gate_stride, begin, number, kept, SIZE) + head
    is_key, of_keys = keys < KEY_DIM, row + key_head * KEY_DIM + keys
    q = tl.load(of_keys, mask=is_key, other=0.0)
    k = tl.load(of_keys + KEY_HEADS * KEY_DIM, mask=is_key, other=0.0)
    of_values = row + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + values
    v = tl.load(of_values, mask=values < VALUE_DIM, other=0.0)
    return q, k, v, tl.load(b), tl.load(b + VALUE_HEADS)


@triton.jit
def _gates(b, a, head_decay, head_bias) -> tuple:
    """What of a change is made, and what of the state is kept."""
    beta = tl.sigmoid(b.to(tl.float32)).to(b.dtype).to(tl.float32)
    x = a.to(tl.float32) + head_bias
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    return beta, tl.exp(head_decay * softplus)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_STEP)
def delta_rule_kernel(
    qkv, gates, decay, time_bias, states, block_table, query_start, seq_lens, num_seqs, num_tokens,
    drafts, rows_b, num_right, num_drafts, row_stride, draft_stride, out, qkv_stride,
    gate_stride, table_stride, block_stride, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, IS_TILED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_K: tl.constexpr, TILE_V: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Some columns of a value head's matrix, which stay in registers. A token is loaded while the
    one before is computed. Grid: (tiles of columns, heads, sequences, and one for padding).
    """
    wait_for_inputs(PDL)
    head, seq = tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin, row, behind, count, first, last = _load_seq(
        query_start, seq_lens, num_seqs, num_tokens, rows_b, num_right, num_drafts, row_stride, seq
    )
    keys, values = tl.arange(0, TILE_K), tl.program_id(0) * TILE_V + tl.arange(0, TILE_V)
    results = out + (begin * VALUE_HEADS + head) * VALUE_DIM + values
    if (last == 0) | (count == 0):
        for _ in range(count):
            tl.store(results, 0.0, mask=values < VALUE_DIM)
            results += VALUE_HEADS * VALUE_DIM
        return
    table, kept = block_table + seq * table_stride, (drafts, row, draft_stride, behind)
    key_head = head % KEY_HEADS if IS_TILED else head // (VALUE_HEADS // KEY_HEADS)
    places = (head * KEY_DIM + keys[:, None]) * VALUE_DIM + values[None, :]
    is_place = (keys < KEY_DIM)[:, None] & (values < VALUE_DIM)[None, :]
    before, _ = _find_state(states, table, first, block_stride, BLOCK_SIZE)
    # Not is_place & (first > 0): Triton 3.9's interpreter makes int32 of such a scalar.
    state = tl.load(before + places, mask=tl.where(is_place, first, 0) > 0, other=0.0)
    tl.debug_barrier()  # it may be overwritten, by other threads than read it
    head_decay, head_bias = tl.load(decay + head), tl.load(time_bias + head)
    inputs = qkv, qkv_stride, gates, gate_stride
    token = _load_token(
        inputs, begin, 0, kept, key_head, head, keys, values, KEY_HEADS, VALUE_HEADS, KEY_DIM,
        VALUE_DIM,
    )  # fmt: skip
    for i in range(count):
        q, k, v, b, a = token
        token = _load_token(
            inputs, begin, tl.minimum(i + 1, count - 1), kept, key_head, head, keys, values,
            KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM,
        )  # fmt: skip
        q, k = q.to(tl.float32), k.to(tl.float32)
        q_scale = tl.rsqrt(tl.sum(q * q) + EPS) * KEY_DIM**-0.5
        k_scale = tl.rsqrt(tl.sum(k * k) + EPS)
        beta, decayed = _gates(b, a, head_decay, head_bias)
        # All sums are of the state before this token: none waits for another one.
        of_k = decayed * k_scale * tl.sum(state * k[:, None], axis=0)
        of_q = decayed * tl.sum(state * q[:, None], axis=0)
        change = k_scale * beta * (v.to(tl.float32) - of_k)
        result = q_scale * (of_q + tl.sum(q * k) * change)
        state = decayed * state + k[:, None] * change[None, :]
        is_result = tl.where(values < VALUE_DIM, i, -1) >= behind
        tl.store(results, result.to(out.dtype.element_ty), mask=is_result)
        results += VALUE_HEADS * VALUE_DIM
        end = first + i + 1
        if (end == last) | ((end < last) & (end % BLOCK_SIZE == 0)):
            to, block_id = _find_state(states, table, end, block_stride, BLOCK_SIZE)
            tl.store(to + places, state, mask=tl.where(is_place, block_id, -1) >= 0)


@triton.jit(do_not_specialize_on_alignment=_STEP)
def keep_drafts_kernel(
    x, drafts, rows_b, query_start, num_drafts, row_stride, draft_stride, x_stride, size,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Inputs of the drafts that sequences end with. It runs when the last step's have been read."""
    wait_for_inputs(PDL)
    seq, columns = tl.program_id(1), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count, mask = tl.load(num_drafts + seq), columns < size
    first = (tl.load(query_start + seq + 1) - count).to(tl.int64)
    to = drafts + tl.load(rows_b + seq) * row_stride + columns
    for i in range(count):
        value = tl.load(x + (first + i) * x_stride + columns, mask=mask)
        tl.store(to + i * draft_stride, value, mask=mask)


@triton.jit
def gated_norm_kernel(
    x, gate, weight, out, eps, gate_stride, HEADS: tl.constexpr, DIM: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    wait_for_inputs(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, TILE)
    mask = columns < DIM
    values = tl.load(x + (row * HEADS + head) * DIM + columns, mask=mask, other=0.0)
    wide = values.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide) / DIM + eps)).to(values.dtype).to(tl.float32)
    normed *= tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    by = tl.load(gate + row * gate_stride + head * DIM + columns, mask=mask, other=0.0)
    by = by.to(tl.float32)
    result = normed.to(values.dtype).to(tl.float32) * (by * tl.sigmoid(by))
    to = out + (row * HEADS + head) * DIM + columns
    tl.store(to, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def sigmoid_gate_kernel(
    x, gate, out, size, gate_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
) -> None:
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    by = tl.load(gate + row * gate_stride + columns, mask=mask, other=0.0)
    values = tl.load(x + row * size + columns, mask=mask, other=0.0)
    factor = tl.sigmoid(by.to(tl.float32)).to(by.dtype).to(tl.float32)
    result = (factor * values.to(tl.float32)).to(x.dtype.element_ty)
    tl.store(out + row * size + columns, result, mask=mask)


@triton.jit
def join_previous_kernel(x, hidden, out, size, BLOCK: tl.constexpr, PDL: tl.constexpr) -> None:
    """A token's x, and the hidden state of the row before. Grid: (tokens, tiles of columns)."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    before = tl.maximum(row - 1, 0)
    to = out + 2 * row * size + columns
    tl.store(to, tl.load(x + row * size + columns, mask=mask), mask=mask)
    tl.store(to + size, tl.load(hidden + before * size + columns, mask=mask), mask=mask)


@triton.jit(do_not_specialize_on_alignment=_STEP)
def join_kept_kernel(
    kept, query_start, rows_b, num_right, out, size, row_stride, TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """What is kept, for each sequence's first token. Grid: (sequences)."""
    wait_for_inputs(PDL)
    seq, columns = tl.program_id(0), tl.arange(0, TILE)
    row = tl.load(query_start + seq).to(tl.int64)
    mask = (columns < size) & (row < tl.load(query_start + seq + 1))
    start = tl.load(rows_b + seq) * row_stride + tl.load(num_right + seq) * size
    previous = tl.load(kept + start + columns, mask=mask, other=0.0)
    to, largest = out + 2 * row * size + columns, tl.max(tl.abs(previous.to(tl.float32)))
    own = tl.load(to, mask=mask, other=0.0)
    tl.store(to, tl.where(largest > 0, own, 0.0).to(own.dtype), mask=mask)
    tl.store(to + size, previous, mask=mask)


@triton.jit(do_not_specialize_on_alignment=_STEP)
def keep_last_kernel(
    hidden, kept, query_start, rows_b, num_drafts, size, row_stride, TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """A token of those that a row keeps. Grid: (sequences, most tokens of one)."""
    wait_for_inputs(PDL)
    seq, number, columns = tl.program_id(0), tl.program_id(1), tl.arange(0, TILE)
    start, stop = tl.load(query_start + seq), tl.load(query_start + seq + 1)
    drafted = tl.load(num_drafts + seq)
    token = (stop - 1 - drafted + number).to(tl.int64)
    mask = (columns < size) & (start < stop) & (number <= drafted)
    values = tl.load(hidden + token * size + columns, mask=mask, other=0.0)
    to = kept + tl.load(rows_b + seq) * row_stride + number * size
    tl.store(to + columns, values, mask=mask)


def short_conv(
    x: Tensor, filters: ConvFilters, cache: StateCache, metadata: AttentionMetadata
) -> Tensor:
    return _conv(x, filters, cache, metadata, has_products=True)


def silu_conv(
    x: Tensor, filters: ConvFilters, cache: StateCache, metadata: AttentionMetadata
) -> Tensor:
    return _conv(x, filters, cache, metadata, has_products=False)


def _conv(
    x: Tensor,
    filters: ConvFilters,
    cache: StateCache,
    metadata: AttentionMetadata,
    has_products: bool,
) -> Tensor:
    (num_taps, num_channels), table = filters.taps_LC.shape, metadata.block_table_BM
    num_seqs, out = len(metadata.seq_lens), x.new_empty(len(x), num_channels)
    tile_t, tile_c = CONV_TILES[len(x) > num_seqs]
    short_conv_kernel[triton.cdiv(num_channels, tile_c), num_seqs + 1](
        x, filters.taps_LC, filters.bias_C, cache.conv_NLC, table, metadata.query_start_A,
        metadata.seq_lens_B, num_seqs, len(x), *_drafts(cache, metadata, 0), out, x.stride(0),
        table.stride(0), cache.conv_NLC.stride(0), CHANNELS=num_channels, TAPS=num_taps,
        TAPS_PAD=triton.next_power_of_2(num_taps), BLOCK_SIZE=cache.block_size,
        HAS_PRODUCTS=has_products, TILE_T=tile_t, TILE_C=tile_c, **pdl(x.device),
    )  # fmt: skip
    _keep_drafts(cache, metadata, 0, x)
    return out


def _drafts(cache: StateCache, metadata: AttentionMetadata, column: int) -> tuple[Any, ...]:
    """Drafts from a column of their inputs on, and where each sequence's are."""
    if (drafts := cache.drafts_RKI) is None:
        return (None,) * 6
    places = metadata.rows_B, metadata.num_right_B, metadata.num_drafts_B
    return drafts[..., column:], *places, drafts.stride(0), drafts.stride(1)


def _keep_drafts(cache: StateCache, metadata: AttentionMetadata, column: int, x: Tensor) -> None:
    drafts, rows_B, _, num_drafts_B, *strides = _drafts(cache, metadata, column)
    if drafts is not None:
        grid = triton.cdiv(x.shape[1], _BLOCK), len(metadata.seq_lens)
        keep_drafts_kernel[grid](
            x, drafts, rows_B, metadata.query_start_A, num_drafts_B, *strides, x.stride(0),
            x.shape[1], BLOCK=_BLOCK, **pdl(x.device),
        )  # fmt: skip


def delta_rule(
    qkv: Tensor,
    gates_T2P: Tensor,
    rule: DeltaRule,
    cache: StateCache,
    metadata: AttentionMetadata,
) -> Tensor:
    assert cache.delta_N is not None
    num_heads, table, num_seqs = len(rule.decay_P), metadata.block_table_BM, len(metadata.seq_lens)
    out = qkv.new_empty(len(qkv), num_heads * rule.value_dim)
    tile_k, tile_v = delta_tile(rule.key_dim, rule.value_dim)
    column = -(qkv.shape[1] + gates_T2P.shape[1])
    delta_rule_kernel[triton.cdiv(rule.value_dim, tile_v), num_heads, num_seqs + 1](
        qkv, gates_T2P, rule.decay_P, rule.time_bias_P, cache.delta_N, table,
        metadata.query_start_A, metadata.seq_lens_B, num_seqs, len(qkv),
        *_drafts(cache, metadata, column), out, qkv.stride(0), gates_T2P.stride(0),
        table.stride(0), cache.delta_N.stride(0), KEY_HEADS=rule.num_key_heads,
        VALUE_HEADS=num_heads, KEY_DIM=rule.key_dim, VALUE_DIM=rule.value_dim,
        IS_TILED=rule.is_tiled, BLOCK_SIZE=cache.block_size,
        TILE_K=tile_k, TILE_V=tile_v, num_warps=DELTA_WARPS, maxnreg=DELTA_REGISTERS,
        **pdl(qkv.device),
    )  # fmt: skip
    _keep_drafts(cache, metadata, column, qkv)
    _keep_drafts(cache, metadata, -gates_T2P.shape[1], gates_T2P)
    return out


def delta_tile(key_dim: int, value_dim: int) -> tuple[int, int]:
    """(keys, values) of a program's part of a matrix, both padded to powers of two."""
    keys = triton.next_power_of_2(key_dim)
    return keys, min(triton.next_power_of_2(value_dim), max(1, _MATRIX_PART // keys))


def join_previous(
    x_TE: Tensor, hidden_TE: Tensor, kept_RKE: Tensor, metadata: AttentionMetadata
) -> Tensor:
    num_tokens, size = x_TE.shape
    out, options = x_TE.new_empty(num_tokens, 2 * size), pdl(x_TE.device)
    if not num_tokens:
        return out
    join_previous_kernel[num_tokens, triton.cdiv(size, _BLOCK)](
        x_TE, hidden_TE, out, size, BLOCK=_BLOCK, **options
    )
    join_kept_kernel[(len(metadata.seq_lens_B),)](
        kept_RKE, metadata.query_start_A, metadata.rows_B, metadata.num_right_B, out, size,
        kept_RKE.stride(0), TILE=triton.next_power_of_2(size), num_warps=8, **options,
    )  # fmt: skip
    return out


def keep_last(hidden_TE: Tensor, kept_RKE: Tensor, metadata: AttentionMetadata) -> None:
    size = hidden_TE.shape[1]
    keep_last_kernel[len(metadata.seq_lens_B), kept_RKE.shape[1]](
        hidden_TE, kept_RKE, metadata.query_start_A, metadata.rows_B, metadata.num_drafts_B, size,
        kept_RKE.stride(0), TILE=triton.next_power_of_2(size), num_warps=8,
        **pdl(hidden_TE.device),
    )  # fmt: skip


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    num_rows, size = x.shape
    out = torch.empty_like(x)
    if num_rows:
        sigmoid_gate_kernel[num_rows, triton.cdiv(size, _BLOCK)](
            x, gate, out, size, gate.stride(0), BLOCK=_BLOCK, **pdl(x.device)
        )
    return out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    (num_rows, size), dim = x.shape, len(weight)
    out = torch.empty_like(x)
    if num_rows:
        gated_norm_kernel[num_rows, size // dim](
            x, gate, weight, out, eps, gate.stride(0), HEADS=size // dim, DIM=dim,
            TILE=triton.next_power_of_2(dim), num_warps=1, **pdl(x.device),
        )  # fmt: skip
    return out


class TritonStates:
    """Implements `StateKernels`."""

    short_conv = staticmethod(short_conv)
    silu_conv = staticmethod(silu_conv)
    delta_rule = staticmethod(delta_rule)
    join_previous = staticmethod(join_previous)
    keep_last = staticmethod(keep_last)
    sigmoid_gate = staticmethod(sigmoid_gate)
    gated_norm = staticmethod(gated_norm)
