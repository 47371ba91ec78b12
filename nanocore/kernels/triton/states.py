"""Layers that carry a state from token to token: a program for some channels of a sequence.

It runs over the sequence's tokens in tiles, and then writes the states that the step leaves behind,
the last one first: the state that it began with lies in the first of their blocks, or in none.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from nanocore.kernels.attention import AttentionMetadata
from nanocore.kernels.states import ConvFilters, StateCache
from nanocore.kernels.triton.launch import pdl, wait_for_inputs

_TILE_TOKENS: Final = 16
_TILE_CHANNELS: Final = 64


@triton.jit
def _conv_input(x_rows, position, first, before, channels, mask, CHANNELS, TAPS) -> tl.tensor:
    """b * u of a token of the step, or what the state before it has of an earlier one.

    x_rows: the token's row in x, from which b's channels and u's lead on.
    """
    is_own = position >= first
    b = tl.load(x_rows + channels, mask=mask & is_own, other=0.0)
    u = tl.load(x_rows + 2 * CHANNELS + channels, mask=mask & is_own, other=0.0)
    product = (b.to(tl.float32) * u.to(tl.float32)).to(b.dtype)
    column = position - first + TAPS - 1
    has_state = (first > 0) & (position < first) & (column >= 0)
    kept = tl.load(before + column * CHANNELS + channels, mask=mask & has_state, other=0.0)
    return tl.where(is_own, product, kept.to(b.dtype))


@triton.jit
def short_conv_kernel(
    x, weight, bias, states, block_table, query_start, seq_lens, out, x_stride, table_stride,
    block_stride, CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_T: tl.constexpr, TILE_C: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    wait_for_inputs(PDL)
    seq = tl.program_id(0).to(tl.int64)
    start, stop = tl.load(query_start + seq), tl.load(query_start + seq + 1)
    last = tl.load(seq_lens + seq)
    if last == 0:  # padding
        return
    first = last - (stop - start)
    table = block_table + seq * table_stride
    channels = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    is_channel = channels < CHANNELS
    before_id = tl.load(table + tl.maximum(first - 1, 0) // BLOCK_SIZE).to(tl.int64)
    before = states + tl.maximum(before_id, 0) * block_stride
    for tile in range(0, stop - start, TILE_T):
        offsets = tile + tl.arange(0, TILE_T)[:, None]
        mask = is_channel[None, :] & (offsets < stop - start)
        rows = (start + offsets).to(tl.int64)
        total = tl.zeros((TILE_T, TILE_C), tl.float32)
        if bias is not None:
            total += tl.load(bias + channels, mask=is_channel, other=0.0)[None, :]
        for tap in tl.static_range(TAPS):
            back = TAPS - 1 - tap
            value = _conv_input(
                x + (rows - back) * x_stride, first + offsets - back, first, before,
                channels[None, :], mask, CHANNELS, TAPS,
            )  # fmt: skip
            of_tap = tl.load(weight + tap * CHANNELS + channels, mask=is_channel, other=0.0)
            total += value.to(tl.float32) * of_tap[None, :]
        c = tl.load(x + rows * x_stride + CHANNELS + channels[None, :], mask=mask, other=0.0)
        result = total.to(c.dtype).to(tl.float32) * c.to(tl.float32)
        to = out + rows * CHANNELS + channels[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=mask)
    tl.debug_barrier()  # the state before is overwritten, by other threads than read it
    num_blocks, block = tl.cdiv(last, BLOCK_SIZE), first // BLOCK_SIZE
    for i in range(num_blocks - block):
        number = num_blocks - 1 - i
        end = tl.minimum((number + 1) * BLOCK_SIZE, last)
        block_id = tl.load(table + number).to(tl.int64)
        to = states + tl.maximum(block_id, 0) * block_stride + channels
        is_kept = is_channel & (block_id >= 0)
        for column in tl.static_range(TAPS - 1):
            position = end - (TAPS - 1) + column
            row = (start + position - first).to(tl.int64)
            value = _conv_input(
                x + row * x_stride, position, first, before, channels, is_channel, CHANNELS, TAPS
            )
            tl.store(to + column * CHANNELS, value.to(states.dtype.element_ty), mask=is_kept)


def short_conv(
    x: Tensor, filters: ConvFilters, cache: StateCache, metadata: AttentionMetadata
) -> Tensor:
    """See `StateKernels`."""
    num_taps, num_channels = filters.taps_LC.shape
    table = metadata.block_table_BM
    out = x.new_zeros(len(x), num_channels)  # of padding tokens
    num_seqs = len(metadata.seq_lens)
    short_conv_kernel[num_seqs, triton.cdiv(num_channels, _TILE_CHANNELS)](
        x, filters.taps_LC, filters.bias_C, cache.states_N, table, metadata.query_start_A,
        metadata.seq_lens_B, out, x.stride(0), table.stride(0), cache.states_N.stride(0),
        CHANNELS=num_channels, TAPS=num_taps, BLOCK_SIZE=cache.block_size, TILE_T=_TILE_TOKENS,
        TILE_C=_TILE_CHANNELS, **pdl(x.device),
    )  # fmt: skip
    return out


class TritonStates:
    """Implements `StateKernels`."""

    short_conv = staticmethod(short_conv)
