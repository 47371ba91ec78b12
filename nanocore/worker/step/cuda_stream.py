"""CUDA's stream and its graphs: see `stream`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

import torch
from torch import Tensor

from nanocore.worker.step.stream import Pending, Stream, Tensors, Work

R = TypeVar("R")

_NUM_WARM_UPS: Final = 2
"""Before a capture: the first compiles kernels, and lets libraries take their workspaces."""


class CudaStream(Stream):
    """Implements `Stream`.

    A result is copied to the host behind the work that made it, and an event says when it is
    there, so that nobody waits for work that was begun later.
    """

    def __init__(
        self, depth: int, device: torch.device, graph_capture: CudaGraphCapture | None = None
    ) -> None:
        super().__init__(depth, graph_capture)
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
    """Implements `stream.GraphCapture`; all graphs of a set share one pool of memory.

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
    """The same tensor, if it is one, without a claim to its memory.

    It stays the graph's, but the next ones may use it too: what a replay leaves is read before the
    next one. Logits of every graph side by side would take gigabytes.
    """
    if not isinstance(result, Tensor):
        return result
    return torch.as_tensor(_Span(result), device=result.device)  # type: ignore[return-value]


class _Span:
    """A float32 tensor's memory, as Numba's CUDA array interface (version 2) tells of it."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous()
        assert tensor.dtype == torch.float32
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": None,
            "typestr": "<f4",
            "version": 2,
        }
