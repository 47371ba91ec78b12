"""Memory of packed weights, in pages of 2 MiB where the system has them: they are read as streams.

Small weights, such as those of a hundred experts, share pages, which would be half empty otherwise.
Memory goes back when nothing in it is used any more. So does what the C library keeps of buffers
that weights were read into, where small objects have settled between them: it was half as much
as the weights of a hundred experts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from threading import Lock
from typing import Final

import numpy as np
import torch
from torch import Tensor

_PAGE_BYTES: Final = 2 << 20
_SMALL_BYTES: Final = 16 << 20
_SHARED_BYTES: Final = 64 << 20
"""Of a piece that small weights share; what is not given out is never touched."""
_ALIGNMENT: Final = 4096


def huge_pages(num_bytes: int) -> Tensor:
    """A piece of its own."""
    memory = np.empty(num_bytes + _PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % _PAGE_BYTES
    return torch.from_numpy(memory[start : start + num_bytes])


def _find_trim() -> Callable[[int], int]:
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim or (lambda _: 0)  # other C libraries have no such function


_trim: Final = _find_trim()


class WeightMemory:
    """Gives out memory; from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._shared, self._used = torch.empty(0, dtype=torch.uint8), 0

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], of any content."""
        if num_bytes > _SMALL_BYTES:
            _trim(0)
            return huge_pages(num_bytes)
        with self._lock:
            if self._used + num_bytes > len(self._shared):
                _trim(0)
                self._shared, self._used = huge_pages(_SHARED_BYTES), 0
            start = self._used
            self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
            return self._shared[start : start + num_bytes]
