"""Layers with states in plain torch, one sequence after the other. Shape suffixes: `interface`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nanocore.kernels.attention import AttentionMetadata
from nanocore.kernels.states import ConvFilters, StateCache


def short_conv(
    x: Tensor, filters: ConvFilters, cache: StateCache, metadata: AttentionMetadata
) -> Tensor:
    b_TC, c_TC, u_TC = x.chunk(3, 1)
    z_TC, out_TC = b_TC * u_TC, torch.zeros_like(c_TC)
    num_taps = len(filters.taps_LC)
    for start, stop, first, blocks in _sequences(cache, metadata):
        before = torch.zeros_like(z_TC[:1]).expand(num_taps - 1, -1)
        if first:
            before = cache.states_N[blocks[(first - 1) // cache.block_size]]
        inputs, count = torch.cat((before, z_TC[start:stop])), stop - start
        y = torch.zeros_like(c_TC[start:stop], dtype=torch.float32)
        if filters.bias_C is not None:
            y += filters.bias_C
        for j, tap_C in enumerate(filters.taps_LC):
            y += inputs[j : j + count].float() * tap_C
        out_TC[start:stop] = c_TC[start:stop] * y.to(x.dtype)
        for end in _written_ends(first, first + count, cache.block_size):
            if (block := blocks[(end - 1) // cache.block_size]) >= 0:
                cache.states_N[block] = inputs[end - first : end - first + num_taps - 1]
    return out_TC


def _sequences(
    cache: StateCache, metadata: AttentionMetadata
) -> Iterator[tuple[int, int, int, list[int]]]:
    """Yield of each sequence its first and last token in T, its computed tokens, and its blocks."""
    starts = metadata.query_start_A.tolist()  # of the step, where a graph replays it
    for i, seq_len in enumerate(metadata.seq_lens_B.tolist()):
        start, stop = starts[i], starts[i + 1]
        if seq_len and stop > start:
            num_blocks = -(-seq_len // cache.block_size)
            blocks = metadata.block_ids(slice(i, i + 1))[0, :num_blocks].tolist()
            yield start, stop, seq_len - (stop - start), blocks


def _written_ends(first: int, last: int, block_size: int) -> Iterator[int]:
    """Yield the ends of the blocks that a step of tokens `first` to `last` fills, and its own."""
    yield from range((first // block_size + 1) * block_size, last, block_size)
    yield last


class TorchStates:
    """Implements `StateKernels`."""

    short_conv = staticmethod(short_conv)
