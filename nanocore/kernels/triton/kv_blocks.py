"""Where blocks lie in the KV cache: a layer's K, V and scales step from block to block by bytes.

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
    STRIDE: tl.constexpr = BLOCK_BYTES * 8 // memory.dtype.element_ty.primitive_bitwidth
    return block * STRIDE
