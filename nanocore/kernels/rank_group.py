"""Ranks that share a model's layers, as far as kernels must know of them.

What implements these is in `worker/communication`. Where ranks exchange through shared memory a
kernel can do it as well as their communicator: so the layout is defined here, and either may come
after the other.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

from torch import Tensor


class RankGroup(Protocol):
    """Ranks that each have a part of a sum, and make the same calls in the same order."""

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, the same bits on every rank; x may be overwritten and returned."""


class SharedMemoryGroup:
    """A group as one of its ranks sees it, which gives exchanges a number each, from 1 on.

    Args:
        rank, size: this rank, and how many there are. buffer_bytes: of a buffer.
        counters: [8 * size] words of 64 bits; a rank's is every eighth, and says which exchange it
        has entered. buffers: uint8, [2, size, buffer_bytes], of even exchanges and of odd ones.

    entered: what this rank's counter was set to, which nobody else writes.
    """

    def __init__(
        self, rank: int, size: int, buffer_bytes: int, counters: Tensor, buffers: Tensor
    ) -> None:
        self.rank = rank
        self.size = size
        self.buffer_bytes = buffer_bytes
        self.counters = counters
        self.buffers = buffers
        self.entered = ctypes.c_uint64(0)
