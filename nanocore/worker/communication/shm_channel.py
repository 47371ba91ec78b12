"""Tensors from one process to another on the same host, in order: between pipeline stages.

A ring of slots in shared memory with two counters, of slots filled and of slots emptied. The writer
is ahead of the reader by `depth` slots at most, so several steps can be in flight; a tensor longer
than a slot takes several. Shapes and dtypes are known on both sides and do not travel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanocore.worker.communication import shm_region
from nanocore.worker.communication.shm_region import SharedRegion

_FILLED, _EMPTIED = 0, 1


def create_channel(slot_bytes: int, depth: int) -> int:
    """A descriptor of a channel's region; see `shm_region.create_region`."""
    return shm_region.create_region(2, slot_bytes * depth)


class ShmChannel:
    """Either end of a channel: one process sends, one receives.

    Args:
        fd: of the channel's region; may be closed afterwards.
        slot_bytes, depth: as at its creation; slot_bytes a multiple of 8.
    """

    def __init__(self, fd: int, slot_bytes: int, depth: int) -> None:
        assert slot_bytes % 8 == 0, f"slots of {slot_bytes} bytes split a number"
        self._region = SharedRegion(fd, 2, slot_bytes * depth)
        self._slots = self._region.payload.view(depth, slot_bytes)
        self._count = 0

    def send(self, x: Tensor) -> None:
        """Send a copy of x; waits while the ring is full."""
        depth, slot_bytes = self._slots.shape
        for part in x.contiguous().view(-1).split(slot_bytes // x.dtype.itemsize):
            self._region.wait(_EMPTIED, max(0, self._count + 1 - depth))
            self._slot(x.dtype)[: len(part)].copy_(part)
            self._count += 1
            self._region.publish(_FILLED, self._count)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next tensor that was sent, which has this shape and dtype; waits for it."""
        out = torch.empty(shape, dtype=dtype)
        for part in out.view(-1).split(self._slots.shape[1] // dtype.itemsize):
            self._region.wait(_FILLED, self._count + 1)
            part.copy_(self._slot(dtype)[: len(part)])
            self._count += 1
            self._region.publish(_EMPTIED, self._count)
        return out

    def _slot(self, dtype: torch.dtype) -> Tensor:
        return self._slots[self._count % len(self._slots)].view(dtype)
