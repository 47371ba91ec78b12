"""Numbers of 4 and 8 bits in 32-bit words, the lowest bits first, as they are packed on disk.

Words are looked at byte by byte: twice the numbers' memory is taken at most.
"""

from __future__ import annotations

import torch
from torch import Tensor


def per_word(bits: int) -> int:
    """Numbers of so many bits in a word."""
    return 32 // bits


def unpack_words(packed: Tensor, bits: int) -> Tensor:
    """int32 [..., W] to uint8 [..., W * per word], each word's numbers in the order of its bits."""
    as_bytes = compact(packed).view(torch.uint8)
    if bits == 8:
        return as_bytes
    halves = as_bytes.to(torch.int16)  # each becomes two bytes, of its low and its high four bits
    return (halves << 4).bitwise_or_(halves).bitwise_and_(0x0F0F).view(torch.uint8)


def compact(tensor: Tensor) -> Tensor:
    """The same with its last dimension's numbers side by side, as views of bytes want them.

    That of one number may have any stride, and counts as contiguous.
    """
    if tensor.is_contiguous() and tensor.stride(-1) == 1:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def zeros_or_none(zero_OG: Tensor, bits: int) -> Tensor | None:
    """Zero points, contiguous; None if all are half of the range."""
    return None if bool((zero_OG == 1 << (bits - 1)).all()) else zero_OG.contiguous()
