"""Tensors from one process to another on the same host, in order: between pipeline stages.

A ring of buffers in shared memory with two counters, of those filled and of those emptied. The
writer is ahead of the reader by `depth` buffers at most, so several steps can be in flight; a
tensor longer than a buffer takes several. Shapes and dtypes are known on both sides and do not
travel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanocore.worker.communication import shm_region
from nanocore.worker.communication.shm_region import SharedRegion

_FILLED, _EMPTIED = 0, 1


def create_channel(buffer_bytes: int, depth: int) -> int:
    """A descriptor of a channel's region; see `shm_region.create_region`."""
    return shm_region.create_region(2, buffer_bytes * depth)


class ShmChannel:
    """Either end of a channel: one process sends, one receives.

    Args:
        fd: of the channel's region; may be closed afterwards.
        buffer_bytes, depth: as at its creation; buffer_bytes a multiple of 8.
    """

    def __init__(self, fd: int, buffer_bytes: int, depth: int) -> None:
        assert buffer_bytes % 8 == 0, f"buffers of {buffer_bytes} bytes split a number"
        self._region = SharedRegion(fd, 2, buffer_bytes * depth)
        self._buffers = self._region.payload.view(depth, buffer_bytes)
        self._count = 0

    def send(self, x: Tensor) -> None:
        """Send a copy of x; waits while the ring is full."""
        depth, buffer_bytes = self._buffers.shape
        for part in x.contiguous().view(-1).split(buffer_bytes // x.dtype.itemsize):
            self._region.wait(_EMPTIED, max(0, self._count + 1 - depth))
            self._buffer(x.dtype)[: len(part)].copy_(part)
            self._count += 1
            self._region.publish(_FILLED, self._count)

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next tensor that was sent, which has this shape and dtype; waits for it."""
        out = torch.empty(shape, dtype=dtype)
        for part in out.view(-1).split(self._buffers.shape[1] // dtype.itemsize):
            self._region.wait(_FILLED, self._count + 1)
            part.copy_(self._buffer(dtype)[: len(part)])
            self._count += 1
            self._region.publish(_EMPTIED, self._count)
        return out

    def _buffer(self, dtype: torch.dtype) -> Tensor:
        return self._buffers[self._count % len(self._buffers)].view(dtype)
