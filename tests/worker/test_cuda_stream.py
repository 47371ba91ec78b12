"""What steps on a CUDA stream may count on, with a CUDA that is late: there may be no device.

What a stream is given runs when somebody waits for it, and no earlier.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanocore.worker.step.cuda_stream import CudaGraphCapture, CudaStream
from nanocore.worker.step.step_memory import StepLayout
from nanocore.worker.step.stream import Tensors, Work
from tests.fake_device import FakeGraphPools

DEVICE = torch.device("cuda", 0)
GRAPH_BYTES = 30
Kernel = Callable[[], object]
tensor_copy, torch_empty = Tensor.copy_, torch.empty


class FakeCuda:
    """Takes the place of parts of torch.cuda.

    loaded: kernels that ran. pinned: addresses of pinned memory. num_host_waits: how often the host
    waited. cached_bytes: free, but torch's. capturing: the graph that is being recorded.
    """

    def __init__(self) -> None:
        self.loaded: set[Kernel] = set()
        self.pinned: set[int] = set()
        self.num_host_waits = 0
        self.free_bytes, self.cached_bytes = 1000, 0
        self.default = self.current = FakeStream(self)
        self.capturing: FakeGraph | None = None
        self.pools = FakeGraphPools()

    def launch(self, kernel: Kernel) -> None:
        """Give a kernel to the current stream, or to the graph that records it."""
        if self.capturing is None:
            self.current.queue.append(kernel)
            return
        assert kernel in self.loaded, "a kernel cannot be loaded while a graph is recorded"
        self.capturing.kernels.append(kernel)

    def copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not non_blocking:
            return tensor_copy(target, source)
        self.launch(lambda: tensor_copy(target, source))
        if target.data_ptr() not in self.pinned:  # CUDA does not return before it is done
            self.current.synchronize()
        return target

    def empty(self, *size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        memory = torch_empty(*size, **options)
        if pin_memory:
            is_allowed = self.capturing is None or self.capturing.mode == "thread_local"
            assert is_allowed, "another thread's allocation spoils the capture"
            self.pinned.add(memory.data_ptr())
        return memory

    def Stream(self, device: torch.device | None = None) -> FakeStream:
        return FakeStream(self, device)

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def CUDAGraph(self) -> FakeGraph:
        return FakeGraph(self)

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def graph_pool_handle(self) -> int:
        return self.pools.new_handle()

    def empty_cache(self) -> None:
        self.free_bytes, self.cached_bytes = self.free_bytes + self.cached_bytes, 0

    def mem_get_info(self) -> tuple[int, int]:
        return self.free_bytes, 2000


@dataclass(eq=False)
class FakeStream:
    """num_done: of the queue's kernels."""

    cuda: FakeCuda
    device: torch.device | None = None
    queue: list[Kernel] = field(default_factory=list)
    num_done: int = 0

    def run(self, count: int) -> None:
        while self.num_done < count:
            kernel = self.queue[self.num_done]
            kernel()
            self.cuda.loaded.add(kernel)
            self.num_done += 1

    def wait_stream(self, other: FakeStream) -> None:
        count = len(other.queue)
        self.queue.append(lambda: other.run(count))

    def synchronize(self) -> None:
        self.cuda.num_host_waits += 1
        self.run(len(self.queue))


@dataclass
class FakeEvent:
    cuda: FakeCuda
    stream: FakeStream | None = None
    position: int = 0

    def record(self, stream: FakeStream) -> None:
        self.stream, self.position = stream, len(stream.queue)

    def query(self) -> bool:
        return self.stream is None or self.stream.num_done >= self.position

    def synchronize(self) -> None:
        self.cuda.num_host_waits += 1
        if self.stream is not None:
            self.stream.run(self.position)


@dataclass(eq=False)
class FakeGraph:
    cuda: FakeCuda
    mode: str = ""
    kernels: list[Kernel] = field(default_factory=list)

    def capture_begin(self, pool: int, capture_error_mode: str = "global") -> None:
        assert not gc.isenabled(), "what garbage frees could call what a capture forbids"
        assert self.cuda.current is not self.cuda.default, "a capture needs a stream of its own"
        self.cuda.pools.enter(pool, self)
        self.mode, self.cuda.capturing = capture_error_mode, self

    def capture_end(self) -> None:
        self.cuda.free_bytes -= GRAPH_BYTES
        self.cuda.capturing = None

    def __del__(self) -> None:
        self.cuda.cached_bytes += GRAPH_BYTES

    def replay(self) -> None:
        self.cuda.current.queue.extend(self.kernels)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in (
        "Stream",
        "Event",
        "CUDAGraph",
        "current_stream",
        "stream",
        "graph_pool_handle",
        "mem_get_info",
        "empty_cache",
    ):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch, "empty", fake.empty)
    monkeypatch.setattr(Tensor, "copy_", lambda *args, **more: fake.copy(*args, **more))
    return fake


def computing(cuda: FakeCuda, values: list[float], done: list[str], name: str = "") -> Work:
    """Work that computes these values on the device, and then notes its name."""

    def work() -> Tensors:
        result = torch.full((len(values),), -1.0)

        def kernel() -> None:
            tensor_copy(result, torch.tensor(values))
            done.append(name)

        cuda.launch(kernel)
        return {"values": result}

    return work


def test_a_result_is_there_when_it_was_waited_for_and_nobody_waits_for_later_work(
    cuda: FakeCuda,
) -> None:
    stream, done = CudaStream(2, DEVICE), list[str]()
    first = stream.run(computing(cuda, [3, 1, 2], done, "first"))
    second = stream.run(computing(cuda, [0.5], done, "second"))
    assert cuda.num_host_waits == 0
    assert not first.is_done()
    assert first.wait()["values"].tolist() == [3, 1, 2]
    assert cuda.num_host_waits == 1
    assert first.is_done()
    assert not second.is_done()
    assert done == ["first"]
    assert second.wait()["values"].tolist() == [0.5]


def test_work_without_a_result_is_waited_for_like_any(cuda: FakeCuda) -> None:
    stream, done = CudaStream(1, DEVICE), list[str]()

    def work() -> Tensors:
        computing(cuda, [1], done, "it")()
        return {}

    pending = stream.run(work)
    assert not pending.is_done()
    assert pending.wait() == {}
    assert done == ["it"]


def layout_of(num_bytes: int) -> StepLayout:
    return StepLayout([("what", torch.uint8, num_bytes)])


def test_memory_is_pinned_grows_and_is_not_given_out_while_a_step_may_read_it(
    cuda: FakeCuda,
) -> None:
    stream, done = CudaStream(1, DEVICE), list[str]()
    first = stream.stage(layout_of(100)).memory
    stream.run(computing(cuda, [], done, "first"))
    second = stream.stage(layout_of(10)).memory
    stream.run(computing(cuda, [], done, "second"))
    assert first.data_ptr() != second.data_ptr()
    assert done == []
    again = stream.stage(layout_of(100)).memory
    assert done == ["first"]
    assert again.data_ptr() == first.data_ptr()
    stream.run(computing(cuda, [], done, "third"))
    large = stream.stage(layout_of(1000)).memory
    assert done == ["first", "second"]
    assert len(large) == 1008
    few, many = layout_of(10), layout_of(5000)
    kept = stream.stage(few)
    stream.stage(few)
    assert stream.stage(few) is kept
    stream.stage(few)
    assert stream.stage(many).memory.data_ptr() != kept.memory.data_ptr()
    stream.stage(few)
    assert stream.stage(few) is not kept, "its memory is gone"
    assert {memory.data_ptr() for memory in (first, second, large)} <= cuda.pinned


def test_later_work_waits_for_what_others_gave_the_device(cuda: FakeCuda) -> None:
    stream, done = CudaStream(1, DEVICE), list[str]()
    computing(cuda, [], done, "tables")()
    stream.join()
    stream.run(computing(cuda, [], done, "step")).wait()
    assert done == ["tables", "step"]


def at_its_address(span: Any, device: torch.device) -> Tensor:
    array = span.__cuda_array_interface__
    address, is_readonly = array["data"]
    assert not is_readonly
    assert (array["version"], array["strides"]) == (2, None)
    dtype = np.dtype(array["typestr"])
    num_bytes = int(np.prod(array["shape"])) * dtype.itemsize
    memory = np.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype)
    return torch.from_numpy(memory.reshape(array["shape"]))


def test_a_graph_repeats_its_work_and_leaves_the_result_where_it_was_recorded(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "as_tensor", at_its_address)
    inputs = torch.zeros(2, dtype=torch.int64)
    # The graph's memory, which it keeps whatever becomes of the tensors.
    logits_memory = np.zeros((2, 3), np.float32)
    claims: list[weakref.ref[Tensor]] = []

    def kernel() -> None:
        logits_memory[:] = inputs.numpy()[:, None]

    def work() -> Tensor:
        result = torch.from_numpy(logits_memory)
        claims.append(weakref.ref(result))
        cuda.launch(kernel)
        allocating = threading.Thread(target=lambda: torch.empty(1, pin_memory=True))
        allocating.start()
        allocating.join()
        return result

    graph_capture = CudaGraphCapture()
    graph_capture.begin_set()
    result, replay = graph_capture.capture(work)
    assert gc.isenabled()
    assert graph_capture.last_bytes == GRAPH_BYTES
    inputs[:] = torch.tensor([5, 7])
    replay()
    cuda.current.synchronize()
    assert result.tolist() == [[5.0] * 3, [7.0] * 3]
    # Other graphs may use that memory too: nothing claims it.
    gc.collect()
    assert all(claim() is None for claim in claims)


def test_a_graph_is_recorded_behind_what_others_gave_the_device(cuda: FakeCuda) -> None:
    done: list[str] = []
    computing(cuda, [], done, "inputs")()

    def kernel() -> None:
        done.append("work")

    graph_capture = CudaGraphCapture()
    graph_capture.begin_set()
    graph_capture.capture(lambda: cuda.launch(kernel))
    assert done[0] == "inputs"


def test_a_set_has_a_pool_of_its_own_for_that_of_graphs_that_are_gone_takes_no_more(
    cuda: FakeCuda,
) -> None:
    graph_capture = CudaGraphCapture()
    for pool in (1, 2):
        graph_capture.begin_set()
        assert cuda.free_bytes == 1000, "what the set before took is the device's again"
        graphs = [graph_capture.capture(lambda: None) for _ in range(3)]
        assert cuda.pools.num_graphs[pool] == 3
        del graphs
        assert cuda.pools.num_graphs[pool] == 0
    with pytest.raises(AssertionError, match="all gone"):
        graph_capture.capture(lambda: None)


@pytest.mark.parametrize("is_spoilt", [False, True])
def test_a_failed_recording_ends_its_capture_and_leaves_the_collector_on(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, is_spoilt: bool
) -> None:
    def work() -> None:
        if cuda.capturing is not None:
            raise ValueError("not permitted")

    end = FakeGraph.capture_end

    def capture_end(graph: FakeGraph) -> None:
        end(graph)
        if is_spoilt:
            raise RuntimeError("the capture was invalidated")

    monkeypatch.setattr(FakeGraph, "capture_end", capture_end)
    graph_capture = CudaGraphCapture()
    graph_capture.begin_set()
    with pytest.raises(ValueError, match="not permitted"):
        graph_capture.capture(work)
    assert cuda.capturing is None
    assert cuda.current is cuda.default
    assert gc.isenabled()
