"""Kernels are timed with operands that the L2 cache does not hold; here on a clock of a fake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import timing
from benchmarks.gpu.attention_cases import attention_cases
from benchmarks.gpu.kernels import measure_case
from benchmarks.gpu.results import Session
from benchmarks.gpu.shapes import CARDS
from nanocore.kernels.attention import AttentionMetadata, AttentionSpec, KVCache
from nanocore.kernels.torch.backend import TorchKernels

CUDA = torch.device("cuda")
CALL, FLUSH = "call", "flush"


class FakeGpu:
    """Graphs note calls and replay them; events read a clock that calls move on.

    A call costs 10 us, and 4 us if its operands are in the L2 cache, as they are after another one.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_us, self.last = 0.0, ""
        self.can_record = True
        self._graph: list[Callable[[], None]] | None = None
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
        monkeypatch.setattr(torch.cuda, "graph", self._capture)
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: FakeEvent(self))
        monkeypatch.setattr(timing, "_flush", lambda _: self.flush)

    @contextmanager
    def _capture(self, graph: FakeGraph) -> Iterator[None]:
        self._graph = graph.calls
        yield
        self._graph = None
        if not self.can_record:
            raise RuntimeError("operation not permitted when stream is capturing")

    def call(self) -> None:
        self._do(CALL)

    def flush(self) -> None:
        self._do(FLUSH)

    def _do(self, work: str) -> None:
        if self._graph is not None:
            self._graph.append(lambda: self._run(work))
        else:
            self._run(work)

    def _run(self, work: str) -> None:
        self.now_us += 37.5 if work == FLUSH else 4.0 if self.last == CALL else 10.0
        self.last = work


class FakeGraph:
    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def replay(self) -> None:
        for call in self.calls:
            call()


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu, self._us = gpu, 0.0

    def record(self) -> None:
        self._us = self._gpu.now_us

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end._us - self._us) / 1e3


def test_operands_are_not_in_the_cache_and_flushing_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures = timing.time_call(FakeGpu(monkeypatch).call, CUDA)
    assert figures["us"]["median"] == pytest.approx(10.0)
    assert figures["method"] == "graph"


def test_what_cannot_be_recorded_is_timed_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    gpu.can_record = False
    figures = timing.time_call(gpu.call, CUDA)
    assert figures["us"]["median"] == pytest.approx(10.0)
    assert figures["method"].startswith("eager (operation not permitted")


def test_noise_of_the_flush_is_subtracted_by_its_median() -> None:
    """Of 20 calls in a graph; nothing takes less than a nanosecond."""
    pairs = [(800.0, 740.0), (820.0, 760.0), (500.0, 750.0)]
    assert timing.subtract(pairs) == [2.5, 3.5, 1e-3]


def small_session(folder: Path) -> Session:
    return Session(folders=(folder,), device=torch.device("cpu"), small=True)


class WrongKernels(TorchKernels):
    """Counts how often a step's plan has to be worked out; wrong for windows, NaN for chunks."""

    name = "wrong"
    num_plans = 0

    def paged_attention(
        self, q_THD: Tensor, cache: KVCache, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        self.num_plans += "plan" not in metadata.scratch
        metadata.scratch["plan"] = self
        if spec.window:
            spec = AttentionSpec(scale=spec.scale)
        out = super().paged_attention(q_THD, cache, metadata, spec)
        return out * torch.nan if len(metadata.seq_lens) == 1 and len(q_THD) == 2 else out


@pytest.mark.campaign
def test_a_wrong_kernel_is_an_error_with_its_times(tmp_path: Path) -> None:
    session, kernels = small_session(tmp_path), WrongKernels()
    cases = {case.name: case for case in attention_cases(session)}
    wrong = {name for name in cases if "window" in name or "chunk/" in name}
    assert len(wrong) == 2
    for name, case in cases.items():
        if name in wrong:
            with pytest.raises(AssertionError, match=r"wrong by .*'us'"):
                measure_case(session, kernels, case, CARDS["H100"])
        else:
            assert measure_case(session, kernels, case, CARDS["H100"])["error"] < 1e-5


def test_each_call_of_attention_makes_its_plan(tmp_path: Path) -> None:
    kernels = WrongKernels()
    case = next(attention_cases(small_session(tmp_path)))
    operands = case.make(kernels)
    for _ in range(3):
        case.run(kernels, operands)
    assert kernels.num_plans == 3


def test_a_smaller_cache_has_fewer_bytes_and_a_window_too(tmp_path: Path) -> None:
    session = Session(folders=(tmp_path,), device=CUDA)
    num_bytes = {case.name: case.num_bytes for case in attention_cases(session)}
    plain = num_bytes["attention/decode/g2/b32/ctx1024"]
    for form in ("int8", "fp8"):
        assert num_bytes[f"attention/decode/g2/b32/ctx1024/{form}"] < 0.52 * plain
    assert num_bytes["attention/decode/g2/b32/ctx8192/window"] == plain
