"""Tensor parallel ranks on one CPU host: processes that reduce through shared memory.

Each rank has two buffers and a counter of the exchanges it has entered. An exchange: copy into
buffer `count % 2`, advance the counter, wait until every rank's counter has got there, read all
buffers. Results are added in order of rank, so every rank has the same bits. No thread, no socket:
a rank that stops is noticed by the executor, which sees by `progress` who is behind. Native kernels
do the same (`kernels/cpu/collective.h`), within steps that are replayed or not.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nanocore.kernels.rank_group import SharedMemoryGroup
from nanocore.worker.communication import shm_region
from nanocore.worker.communication.shm_region import SharedRegion

BUFFER_BYTES = 1 << 20
"""A rank's buffer where nobody says otherwise; longer tensors go in pieces of this size."""


def create_region(num_ranks: int, buffer_bytes: int) -> int:
    """A descriptor of the region that a group of ranks shares; see `shm_region.create_region`."""
    return shm_region.create_region(num_ranks, _payload_bytes(num_ranks, buffer_bytes))


def progress(fd: int, num_ranks: int) -> list[int]:
    """Exchanges that each rank has entered. Where ranks wait, they wait for the lowest."""
    return shm_region.read_counters(fd, num_ranks)


def _payload_bytes(num_ranks: int, buffer_bytes: int) -> int:
    return 2 * num_ranks * buffer_bytes


class ShmCommunicator(SharedMemoryGroup):
    """Implements `Communicator`.

    Args:
        fd: of the group's region; may be closed afterwards. rank, size: ours, and the group's.
        buffer_bytes: as at its creation; a multiple of 8.
    """

    def __init__(self, fd: int, rank: int, size: int, buffer_bytes: int) -> None:
        assert 0 <= rank < size >= 2, f"rank {rank} of {size}"
        assert buffer_bytes % 8 == 0, f"buffers of {buffer_bytes} bytes split a number"
        self._region = SharedRegion(fd, size, _payload_bytes(size, buffer_bytes))
        super().__init__(rank, size, buffer_bytes, self._region.counters, self._region.payload)
        self._buffers: dict[torch.dtype, list[list[Tensor]]] = {}

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, of x's dtype; bfloat16 is added in float32. Overwrites x."""
        x = x.contiguous()
        for part, buffers in self._exchange(x):
            if len(buffers) == 2:
                torch.add(buffers[0], buffers[1], out=part)
            else:
                total = buffers[0].float() if part.dtype.itemsize < 4 else buffers[0].clone()
                for buffer in buffers[1:]:
                    total += buffer
                part.copy_(total)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape]: x of every rank, in the order of ranks; any dtype."""
        out = x.new_empty(self.size, *x.shape)
        start, flat = 0, out.view(self.size, x.numel())
        for part, buffers in self._exchange(x.contiguous()):
            for rank, buffer in enumerate(buffers):
                flat[rank, start : start + len(part)] = buffer
            start += len(part)
        return out

    def _exchange(self, x: Tensor) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Pieces of x (flat views), each with that piece of every rank, in order of ranks.

        The second is to be read before the next piece is asked for.
        """
        both_buffers = self._buffers_of(x.dtype)
        length = len(both_buffers[0][0])
        flat = x.view(-1)
        for part in (flat,) if len(flat) <= length else flat.split(length):
            self.entered.value += 1
            number = self.entered.value
            buffers = [buffer[: len(part)] for buffer in both_buffers[number % 2]]
            # Nobody reads the buffer we overwrite: it was that of exchange number - 2. We have
            # left number - 1, so every rank had entered number - 1, so it had left number - 2. One
            # wait per exchange is enough because there are two buffers.
            buffers[self.rank].copy_(part)
            self._region.publish(self.rank, number)
            for rank in range(self.size):
                self._region.wait(rank, number)
            yield part, buffers

    def _buffers_of(self, dtype: torch.dtype) -> list[list[Tensor]]:
        """All buffers as tensors of this dtype: the even ones of every rank, and the odd ones."""
        if dtype not in self._buffers:
            shape = (2, self.size, self.buffer_bytes // dtype.itemsize)
            buffers = self.buffers.view(dtype).view(shape)
            self._buffers[dtype] = [list(half) for half in buffers]
        return self._buffers[dtype]
