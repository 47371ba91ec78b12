"""Where tokens lie in the KV cache: a layer's K, V and scales step from block to block by bytes.

How many is one number for all of them and a constant of the kernels, see `KVCache.block_bytes`: it
is a multiple of 64, so whoever loads from a block knows how it is aligned.
"""

from __future__ import annotations

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
