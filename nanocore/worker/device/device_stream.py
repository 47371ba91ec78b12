"""A device's queue of work: work is begun here and its result is waited for later; and CUDA's.

The host runs ahead of the device by a step. So memory that a step's work reads on the host is not
written again before that step is done: it comes from a ring with a buffer for each step that may be
in flight, and one to fill. The second phase of a step has a ring of its own.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from typing import Any, Final, Protocol, TypeVar

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

Tensors = Mapping[str, Tensor]
"""By name; there may be none."""

_NUM_PHASES: Final = 2

Work = Callable[[], Tensors]
"""Enqueues what a device is to do, without waiting for it; returns what the host is to have."""


class Pending(Protocol):
    """Work that was begun and whose result may be on its way."""

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> Tensors:
        """Wait until the device is done; the result, on the host."""
        ...


class StagingBuffer(msgspec.Struct):
    """One of the ring. memory: on the host, uint8. reader: work that may read it.

    scratch: what its writer made of this memory, for it to find when the buffer comes round again;
    gone with the memory when the buffer grows.
    """

    memory: Tensor
    reader: Pending | None = None
    scratch: dict[Hashable, Any] = msgspec.field(default_factory=dict)


class Stream(ABC):
    """Runs work in the order in which it was given. staged: what `stage` gave last.

    Args:
        depth: how many steps may be in flight at most.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._rings = [
            deque(StagingBuffer(self.allocate(0)) for _ in range(depth + 1))
            for _ in range(_NUM_PHASES)
        ]
        self.staged = self._rings[0][-1]

    def stage(self, num_bytes: int, phase: int = 0) -> StagingBuffer:
        """Memory of at least num_bytes on the host, that the next work may read.

        phase: 1 for work that is given behind a step's first, to which it belongs.
        """
        ring = self._rings[phase]
        buffer = ring[0]
        ring.rotate(-1)
        if buffer.reader is not None:
            buffer.reader.wait()
        if len(buffer.memory) < num_bytes:
            buffer.memory = self.allocate(num_bytes * 5 // 4)
            buffer.scratch.clear()
        self.staged = buffer
        return buffer

    def run(self, work: Work) -> Pending:
        """Begin work, which may read what `stage` gave last."""
        self.staged.reader = pending = self.enqueue(work)
        return pending

    def allocate(self, num_bytes: int) -> Tensor:
        """Memory on the host, uint8, that the device can copy from while the host goes on."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    @abstractmethod
    def join(self) -> None:
        """Have work that is begun from now on wait for what this thread gave the device before."""

    @abstractmethod
    def enqueue(self, work: Work) -> Pending:
        """Begin work behind all that was begun before, and do not wait for it."""


R = TypeVar("R")

_NUM_WARM_UPS: Final = 2
"""Before a capture: the first compiles kernels, and lets libraries take their workspaces."""


class CudaStream(Stream):
    """Implements `Stream`.

    A result is copied to the host behind the work that made it, and an event says when it is
    there, so that nobody waits for work that was begun later.
    """

    def __init__(self, depth: int, device: torch.device) -> None:
        super().__init__(depth)
        self._stream = torch.cuda.Stream(device)

    def join(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def enqueue(self, work: Work) -> Pending:
        with torch.cuda.stream(self._stream):
            result = {name: _to_host(tensor) for name, tensor in work().items()}
            event = torch.cuda.Event()
            event.record(self._stream)
        return _CudaPending(event, result)


def _to_host(tensor: Tensor) -> Tensor:
    # torch keeps the tensor's memory, once it is free, until the copy is done.
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return on_host.copy_(tensor, non_blocking=True)


class _CudaPending:
    """Implements `Pending`: result is on the host once the event has passed."""

    def __init__(self, event: torch.cuda.Event, result: Tensors) -> None:
        self._event = event
        self._result = result

    def is_done(self) -> bool:
        return self._event.query()

    def wait(self) -> Tensors:
        self._event.synchronize()  # without the interpreter's lock: the io thread goes on
        return self._result


class CudaGraphCapture:
    """Implements `step_graphs.GraphCapture`; all graphs of a set share one pool of memory.

    So they must be captured from the largest on, and no two of them may run at once.

    last_bytes: memory that the last one took beside the pool as it was.
    """

    def __init__(self) -> None:
        self.last_bytes = 0
        self._stream = torch.cuda.Stream()

    def begin_set(self) -> None:
        """Torch refuses a pool whose graphs are all gone: every set has one of its own."""
        torch.cuda.empty_cache()  # what is left of the set before goes back to the device
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], R]) -> tuple[R, Callable[[], None]]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_NUM_WARM_UPS):
                work()
        self._stream.synchronize()
        free_bytes = torch.cuda.mem_get_info()[0]
        graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`, which looks through the whole heap for garbage each time. None may
        # be found during a capture either: what it frees could call what a capture forbids.
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                # Other threads may allocate pinned memory meanwhile, which is no part of this.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    result = work()
                except BaseException:
                    # The stream would go on capturing. What ended the work may have spoilt the
                    # capture too, and is the error to report.
                    with suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            if collects:
                gc.enable()
        self.last_bytes = max(0, free_bytes - torch.cuda.mem_get_info()[0])
        return _borrowed(result), graph.replay


def _borrowed(result: R) -> R:
    """The same tensors, of a Struct, without a claim to their memory.

    It stays the graph's, but the next ones may use it too: what a replay leaves is read before the
    next one. Logits of every graph side by side would take gigabytes.
    """
    if not isinstance(result, msgspec.Struct):
        return result
    return replace(
        result,
        **{
            name: torch.as_tensor(_Span(tensor), device=tensor.device)
            for name in result.__struct_fields__
            if isinstance(tensor := getattr(result, name), Tensor)
        },
    )


class _Span:
    """A contiguous tensor's memory, as Numba's CUDA array interface (version 2) tells of it."""

    _TYPES: Final = {torch.float32: "<f4", torch.int64: "<i8"}

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous()
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": None,
            "typestr": self._TYPES[tensor.dtype],
            "version": 2,
        }
