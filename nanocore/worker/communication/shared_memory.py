"""Ranks and pipeline stages on one CPU host: counters to wait on, and bytes to pass, in a memfd.

A region has no name and vanishes with its last descriptor and mapping. It begins with counters,
each written by one side and alone in its cache line; the payload follows. `ShmChannel` passes
tensors between stages in a ring of buffers; `ShmCommunicator` reduces among ranks, and native
kernels do the same (`kernels/cpu/collective.h`).

Ordering: a writer fills the payload, then advances its counter; a reader waits for the counter,
then reads the payload. That needs stores seen in the order they were made and loads made in order,
which x86-64 guarantees (total store order; `copy_` has fenced its non-temporal stores and joined
its threads when it returns). Python cannot emit the barriers that other machines want: refused.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from nanocore.kernels.step import SharedMemoryGroup
from nanocore.protocol.errors import ConfigError

_CACHE_LINE_BYTES = 64
_PAGE_BYTES = 4096
_SPIN_POLLS = 20  # 2 us: yielding costs 0.3 us where nobody wants the core, so it may begin soon
_YIELD_S = 1e-3
_MAX_SLEEP_S = 1e-3


def payload_offset(num_counters: int) -> int:
    """Start of the payload in bytes: after the counters, at a page."""
    return -(-num_counters * _CACHE_LINE_BYTES // _PAGE_BYTES) * _PAGE_BYTES


def create_region(num_counters: int, payload_bytes: int) -> int:
    """A descriptor of a new region of zeros, to be inherited (`pass_fds`) by those who share it.

    Raises ConfigError: the machine's memory ordering is not known to suffice. OSError: no memory.
    """
    if platform.machine() != "x86_64":
        raise ConfigError(
            f"ranks on a CPU share memory, which needs an x86-64 machine; this one is "
            f"{platform.machine()}: use one rank, or --device cuda"
        )
    fd = os.memfd_create("nanocore")
    # Taken now, so that a lack of memory is an error here and not a SIGBUS in the middle of a step.
    os.posix_fallocate(fd, 0, payload_offset(num_counters) + payload_bytes)
    return fd


class SharedRegion:
    """A mapping of a region; it ends with the last object that refers to it.

    payload: uint8 [payload_bytes]. counters: int64, a cache line of words for each.
    """

    def __init__(self, fd: int, num_counters: int, payload_bytes: int) -> None:
        offset = payload_offset(num_counters)
        mapping = mmap.mmap(fd, offset + payload_bytes)
        self._words = memoryview(mapping)[:offset].cast("Q")
        self.counters = torch.frombuffer(mapping, dtype=torch.int64, count=offset // 8)
        self.payload = torch.frombuffer(mapping, dtype=torch.uint8, offset=offset)

    def publish(self, counter: int, value: int) -> None:
        """Set a counter that is ours; what was written to the payload before is seen first."""
        self._words[counter * (_CACHE_LINE_BYTES // 8)] = value

    def wait(self, counter: int, value: int) -> None:
        """Return when the counter has reached `value`.

        Polls, soon lets others run between polls (another rank may want this core), then sleeps
        for a share of the time it has waited: a long wait costs no core, and is noticed at most
        1 ms late.
        """
        words, index = self._words, counter * (_CACHE_LINE_BYTES // 8)
        for _ in range(_SPIN_POLLS):
            if words[index] >= value:
                return
        start_s = time.monotonic()
        while words[index] < value:
            waited_s = time.monotonic() - start_s
            if waited_s < _YIELD_S:
                os.sched_yield()
            else:
                time.sleep(min(waited_s / 8, _MAX_SLEEP_S))


_FILLED, _EMPTIED = 0, 1


def create_channel(buffer_bytes: int, depth: int) -> int:
    """Create a channel's region; return its descriptor."""
    return create_region(2, buffer_bytes * depth)


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


BUFFER_BYTES = 1 << 20
"""A rank's buffer where nobody says otherwise; longer tensors go in pieces of this size."""


def create_group_region(num_ranks: int, buffer_bytes: int) -> int:
    """Create the region that a group of tensor parallel ranks shares; return its descriptor."""
    return create_region(num_ranks, _payload_bytes(num_ranks, buffer_bytes))


def progress(fd: int, num_ranks: int) -> list[int]:
    """Exchanges that each rank has entered, for one who takes no part. Where ranks wait, they wait
    for the lowest.
    """
    words = os.pread(fd, num_ranks * _CACHE_LINE_BYTES, 0)
    return list(memoryview(words).cast("Q")[:: _CACHE_LINE_BYTES // 8])


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
