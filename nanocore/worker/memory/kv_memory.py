"""A rank's KV memory: one array of blocks, and in each block all of this rank's layers.

What a block holds, K and V of its tokens in every layer and their scales where they are quantized,
is one span of bytes: to move it is one copy, and to check it one checksum. A layer's K and V are
views that step from block to block. Layers may differ in what they keep. Owner: `ModelRunner`.
Shape suffixes: see `interface`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from nanocore.kernels.attention import KVCache
from nanocore.kernels.kv_quantization import KVCacheFormat

ALIGNMENT_BYTES: Final = 64
"""Alignment of a block and of each layer's K and V in it: a cache line, and what TMA needs."""

KV_LAYOUT_VERSION: Final = 2
"""To be counted up when blocks hold the same values otherwise."""

_SCALE_ALIGNMENT_BYTES: Final = 16

_CROWDING_BYTES: Final = 16 << 10
_MAX_STAGGER_SHARE: Final = 0.01


class KVSpec(msgspec.Struct, frozen=True):
    """Shape of a token's K and V in a layer: heads of this rank, values of each."""

    num_kv_heads: int
    head_dim: int


class _Part(msgspec.Struct, frozen=True):
    """Part of a block: [S, K, D] values of a layer's K or V, or their [S, K] scales."""

    start_byte: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end_byte(self) -> int:
        return self.start_byte + self.num_bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, memory: Tensor) -> Tensor:
        """A view of all blocks' memory (uint8 [N, bytes]), [N, *shape]."""
        values, itemsize = memory.view(self.dtype), self.dtype.itemsize
        in_block = [math.prod(self.shape[i + 1 :]) for i in range(len(self.shape))]
        # Said outright: torch makes up a stride of its own where there is a single block.
        return values.as_strided(
            (len(values), *self.shape),
            (memory.shape[1] // itemsize, *in_block),
            values.storage_offset() + self.start_byte // itemsize,
        )


class KVLayout:
    """Layout of a block. block_bytes: from a block to the next.

    Args:
        specs: of this rank's layers.
    """

    def __init__(self, specs: Sequence[KVSpec], kv_format: KVCacheFormat, block_size: int) -> None:
        self.layers: list[list[_Part]] = []
        end_byte = 0
        for spec in specs:
            self.layers.append(list(_parts(end_byte, spec, kv_format, block_size)))
            end_byte = self.layers[-1][-1].end_byte
        self.block_bytes = _aligned(end_byte, ALIGNMENT_BYTES)
        head_bytes = max(block_size * spec.head_dim for spec in specs) * kv_format.dtype.itemsize
        self.block_bytes += _stagger_bytes(self.block_bytes, head_bytes)

    def layer_bytes(self, index: int) -> int:
        """Bytes of a layer's K and V in a block, without what lies between them."""
        return sum(part.num_bytes for part in self.layers[index])


class KVMemory:
    """num_blocks blocks of this layout on a device, zeros at first.

    blocks: all that they hold, uint8 [num_blocks, block_bytes], to be read or written.

    Zeros, because attention masks what it gathers too much of, and 0 * NaN would be NaN.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self._layout = layout
        num_bytes = num_blocks * layout.block_bytes
        self.blocks = _zeros(num_bytes, device).view(num_blocks, layout.block_bytes)

    def layer(self, index: int) -> KVCache:
        return KVCache(*(part.of(self.blocks) for part in self._layout.layers[index]))

    def layers(self) -> list[KVCache]:
        return [self.layer(index) for index in range(len(self._layout.layers))]


def _parts(
    start_byte: int, spec: KVSpec, kv_format: KVCacheFormat, block_size: int
) -> Iterator[_Part]:
    """A layer's K, V, and their scales if there are any: the fields of a `KVCache`."""
    shape: tuple[int, ...] = block_size, spec.num_kv_heads, spec.head_dim
    kinds = [(shape, kv_format.dtype, ALIGNMENT_BYTES)] * 2
    if kv_format.scale_dtype is not None:
        kinds += [(shape[:2], kv_format.scale_dtype, _SCALE_ALIGNMENT_BYTES)] * 2
    for shape, dtype, alignment in kinds:
        part = _Part(_aligned(start_byte, alignment), shape, dtype)
        yield part
        start_byte = part.end_byte


def _stagger_bytes(block_bytes: int, head_bytes: int) -> int:
    """Gap between blocks for the sake of a CPU's cache, or 0. head_bytes: of a head's K.

    A prompt's attention reads the same head of many blocks, again and again. Where blocks begin at
    multiples of a large power of two these would share a few sets of the cache, and it took 5 to
    8 % longer; so each block is shifted by a head, and by two lines, against the one before.
    """
    stagger_bytes = _aligned(head_bytes + 128, ALIGNMENT_BYTES)
    is_crowded = block_bytes % _CROWDING_BYTES == 0
    return stagger_bytes if is_crowded and stagger_bytes < _MAX_STAGGER_SHARE * block_bytes else 0


def _aligned(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    # numpy gets zeroed pages from the system on first use; torch.zeros would touch them all,
    # and a cache sized by the machine's memory is mostly never used.
    memory = np.zeros(num_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return torch.from_numpy(memory[start : start + num_bytes])
