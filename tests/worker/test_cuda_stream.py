"""What CUDA is told, in which order, with a CUDA that notes it down: there may be no device."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from nanocore.worker.device.cuda_stream import CudaGraphRecorder, CudaStream
from nanocore.worker.device.stream import Tensors
from tests.fake_device import FakeGraphPools

DEVICE = torch.device("cuda", 0)


@dataclass
class Result:
    """As a step's."""

    logits: Tensor
    token_ids: Tensor
    name: str = "a step"


class FakeCuda:
    """Takes the place of parts of torch.cuda. log: what was done. ready: events that passed."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.ready: set[int] = set()
        self.num_events = 0
        self.num_streams = 0
        self.free_bytes = 1000
        self.current = "default"
        self.pools = FakeGraphPools()

    def Stream(self, device: torch.device | None = None) -> FakeStream:
        self.num_streams += 1
        return FakeStream(self, f"stream {self.num_streams}", device)

    def Event(self) -> FakeEvent:
        self.num_events += 1
        return FakeEvent(self, self.num_events)

    def CUDAGraph(self) -> FakeGraph:
        return FakeGraph(self)

    def current_stream(self, device: torch.device | None = None) -> str:
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    def graph_pool_handle(self) -> int:
        return self.pools.new_handle()

    def empty_cache(self) -> None:
        self.log.append("cache emptied")

    def mem_get_info(self) -> tuple[int, int]:
        return self.free_bytes, 2000


@dataclass
class FakeStream:
    cuda: FakeCuda
    name: str
    device: torch.device | None

    def wait_stream(self, other: str) -> None:
        self.cuda.log.append(f"{self.name} waits for {other}")

    def synchronize(self) -> None:
        self.cuda.log.append(f"host waits for {self.name}")


@dataclass
class FakeEvent:
    cuda: FakeCuda
    number: int

    def record(self, stream: FakeStream) -> None:
        self.cuda.log.append(f"event {self.number} on {stream.name}")

    def query(self) -> bool:
        return self.number in self.cuda.ready

    def synchronize(self) -> None:
        self.cuda.log.append(f"host waits for event {self.number}")
        self.cuda.ready.add(self.number)


@dataclass(eq=False)
class FakeGraph:
    cuda: FakeCuda

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        assert not gc.isenabled()
        self.cuda.pools.enter(pool, self)
        self.cuda.log.append(f"capture on {self.cuda.current}, pool {pool}, {capture_error_mode}")

    def capture_end(self) -> None:
        self.cuda.free_bytes -= 30
        self.cuda.log.append("captured")

    def replay(self) -> None:
        self.cuda.log.append("replay")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in (
        "Stream", "Event", "CUDAGraph", "current_stream", "stream", "graph_pool_handle",
        "mem_get_info", "empty_cache",
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    empty = torch.empty

    def pinned(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            fake.log.append(f"pinned {size}")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", pinned)
    return fake


def test_a_result_is_copied_behind_its_work_and_an_event_tells_when_it_is_there(
    cuda: FakeCuda,
) -> None:
    stream = CudaStream(2, DEVICE)
    cuda.log.clear()

    def work() -> Tensors:
        cuda.log.append(f"work on {cuda.current}")
        return {"token_ids": torch.tensor([3, 1, 2]), "logprob": torch.tensor([0.5])}

    first, second = stream.run(work), stream.run(dict)
    assert cuda.log == [
        "work on stream 1", "pinned (torch.Size([3]),)", "pinned (torch.Size([1]),)",
        "event 1 on stream 1", "event 2 on stream 1",
    ]  # fmt: skip
    assert not first.is_done()
    result = {name: tensor.tolist() for name, tensor in first.wait().items()}
    assert result == {"token_ids": [3, 1, 2], "logprob": [0.5]}
    assert cuda.log[-1] == "host waits for event 1"
    assert first.is_done()
    assert not second.is_done()
    assert second.wait() == {}


def test_memory_is_pinned_grows_and_is_not_given_out_while_a_step_may_read_it(
    cuda: FakeCuda,
) -> None:
    stream = CudaStream(1, DEVICE)
    first = stream.stage(100)
    stream.run(dict)
    second = stream.stage(10)
    assert first.data_ptr() != second.data_ptr()
    stream.run(dict)
    cuda.log.clear()
    again = stream.stage(100)
    assert cuda.log == ["host waits for event 1"]
    assert again.data_ptr() == first.data_ptr()
    stream.run(dict)
    cuda.log.clear()
    assert len(stream.stage(1000)) == 1000
    assert cuda.log == ["host waits for event 2", "pinned (1250,)"]


def test_later_work_waits_for_what_others_gave_the_device(cuda: FakeCuda) -> None:
    stream = CudaStream(1, DEVICE)
    stream.join()
    assert cuda.log[-1] == "stream 1 waits for default"


def test_a_graph_is_recorded_after_warm_ups_in_the_common_pool(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans: list[Any] = []
    as_tensor = torch.as_tensor
    monkeypatch.setattr(
        torch, "as_tensor", lambda span, device: (spans.append(span), as_tensor([1.0]))[1]
    )
    recorder = CudaGraphRecorder()
    recorder.begin_set()
    assert cuda.log.pop() == "cache emptied"
    made: list[Result] = []

    def work() -> Result:
        cuda.log.append(f"work on {cuda.current}")
        made.append(Result(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)))
        return made[-1]

    result, replay = recorder.record(work)
    assert cuda.log == [
        "stream 1 waits for default", "work on stream 1", "work on stream 1",
        "host waits for stream 1", "capture on stream 1, pool 1, thread_local",
        "work on stream 1", "captured",
    ]  # fmt: skip
    assert gc.isenabled()
    assert recorder.last_bytes == 30
    replay()
    assert cuda.log[-1] == "replay"
    # The result is where the recording left it, and does not keep that memory from others.
    assert [span.__cuda_array_interface__ for span in spans] == [
        {"data": (made[-1].logits.data_ptr(), False), "shape": (2, 3), "strides": None,
         "typestr": "<f4", "version": 2},
        {"data": (made[-1].token_ids.data_ptr(), False), "shape": (2,), "strides": None,
         "typestr": "<i8", "version": 2},
    ]  # fmt: skip
    assert result.name == "a step"
    assert result.logits is not made[-1].logits


def test_a_set_has_a_pool_of_its_own_for_that_of_graphs_that_are_gone_takes_no_more(
    cuda: FakeCuda,
) -> None:
    recorder = CudaGraphRecorder()
    for pool in (1, 2):
        recorder.begin_set()
        graphs = [recorder.record(lambda: None) for _ in range(3)]
        assert cuda.pools.num_graphs[pool] == 3
        del graphs
        assert cuda.pools.num_graphs[pool] == 0
    with pytest.raises(AssertionError, match="all gone"):
        recorder.record(lambda: None)


def test_a_failed_recording_ends_its_capture_and_leaves_the_collector_on(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        if cuda.log[-1].startswith("capture on"):
            raise ValueError("not permitted")

    def spoilt(graph: FakeGraph) -> None:
        end(graph)
        raise RuntimeError("the capture was invalidated")

    recorder, end = CudaGraphRecorder(), FakeGraph.capture_end
    for capture_end in (end, spoilt):
        recorder.begin_set()
        monkeypatch.setattr(FakeGraph, "capture_end", capture_end)
        with pytest.raises(ValueError, match="not permitted"):
            recorder.record(work)
        assert cuda.log[-1] == "captured"
        assert cuda.current == "default"
        assert gc.isenabled()
