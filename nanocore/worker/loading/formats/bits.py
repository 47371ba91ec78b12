"""Numbers of 4 and 8 bits in 32-bit words, the lowest bits first, as they are packed on disk.

Words are looked at byte by byte, so that nothing larger than the numbers themselves is made.
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
    unpacked = torch.empty(*as_bytes.shape, 2, dtype=torch.uint8, device=packed.device)
    torch.bitwise_and(as_bytes, 15, out=unpacked[..., 0])
    torch.bitwise_right_shift(as_bytes, 4, out=unpacked[..., 1])
    return unpacked.flatten(-2)


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
