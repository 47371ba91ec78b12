"""Kernels are timed with operands that the L2 cache does not hold; here on a clock of a fake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import timing
from benchmarks.gpu.attention_cases import Heads, attention_cases, error, make_step, with_sdpa
from benchmarks.gpu.kernel_times import measure_case
from benchmarks.gpu.session import Session
from nanocore.kernels.interface import AttentionMetadata, AttentionSpec, KVCache
from nanocore.kernels.torch_backend import TorchKernels

L2_BYTES = 50 * 2**20
CUDA = torch.device("cuda")


class FakeGpu:
    """Graphs note calls and replay them; events read a clock that calls move on.

    A call that touches the operands of set i costs 10 us, and 4 us if they are in the L2 cache:
    the last L2_BYTES that were touched are.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_bytes: float) -> None:
        self.now_us, self.num_bytes = 0.0, num_bytes
        self.touched: list[int] = []
        self._graph: list[Callable[[], object]] | None = None
        properties = SimpleNamespace(L2_cache_size=L2_BYTES)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
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

    def calls(self, count: int) -> list[Callable[[], object]]:
        return [lambda i=i: self._do(lambda: self._touch(i)) for i in range(count)]

    def flush(self) -> None:
        self._do(self._read_all)

    def _do(self, work: Callable[[], None]) -> None:
        if self._graph is not None:
            self._graph.append(work)
        else:
            work()

    def _touch(self, number: int) -> None:
        num_held = int(L2_BYTES / self.num_bytes)
        is_held = number in self.touched[max(0, len(self.touched) - num_held) :]
        self.now_us += 4.0 if is_held else 10.0
        self.touched.append(number)

    def _read_all(self) -> None:
        self.now_us += 37.5
        self.touched.clear()


class FakeGraph:
    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

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


@pytest.mark.parametrize("num_bytes", [4e3, 1e6, 2.4e6, 9e6, 40e6, 60e6, 3e9])
def test_operands_of_any_size_are_not_in_the_cache(
    num_bytes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(monkeypatch, num_bytes)
    count = timing.num_sets(num_bytes, CUDA)
    figures = timing.time_calls(gpu.calls(count), CUDA, num_bytes)
    assert figures["us"]["median"] == pytest.approx(10.0)
    is_flushed = "flushed" in figures["method"]
    between_uses = (count - 1) * num_bytes
    assert is_flushed or between_uses >= 3 * L2_BYTES
    assert count <= 64


def test_a_few_sets_alone_would_be_found_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the flush is for: 16 sets of 1 MB are served by the cache."""
    gpu = FakeGpu(monkeypatch, 1e6)
    figures = timing.time_calls(gpu.calls(16), CUDA)
    assert figures["us"]["median"] == pytest.approx(4.0, rel=0.1)


def test_flushing_is_not_counted() -> None:
    assert timing.subtract([40.5, 41.0, 40.25], [37.0, 38.0, 37.5]) == [3.0, 3.5, 2.75]
    assert timing.subtract([37.0], [38.0]) == [0.001]


def small_session(folder: Path) -> Session:
    return Session(out=folder, device=torch.device("cpu"), small=True)


def test_torchs_attention_has_our_keys_and_values_before_the_clock_starts(tmp_path: Path) -> None:
    """Of ours, and drawn by nobody: the same result from the same bytes."""
    heads, seqs = Heads(4, 2, 32), [(70, 70), (70, 70)]
    step = make_step(small_session(tmp_path), heads, seqs, 0, torch.float32)
    call = with_sdpa(step)
    state = torch.get_rng_state()
    out = call()
    assert torch.equal(torch.get_rng_state(), state)
    k = call.args[1]  # type: ignore[attr-defined]
    assert k.shape == (2, heads.num_kv, 70, 32)
    assert error(step, out.transpose(1, 2).flatten(0, 1)) < 1e-5


def test_attention_has_the_steps_that_engines_have(tmp_path: Path) -> None:
    cases = {case.name: case for case in attention_cases(Session(out=tmp_path, device=CUDA))}
    for rows in (1, 2, 8, 16, 32, 48, 64, 128, 256):
        assert f"attention/decode/g2/b{rows}/ctx1024" in cases
        assert f"attention/decode/g4/b{rows}/ctx1024" in cases
    assert "attention/decode/g2/b40/ctx512, one of 131072" in cases
    assert "attention/chunk/g2/64 of 65536" in cases
    plain = cases["attention/decode/g2/b32/ctx1024"].num_bytes
    for form in ("int8", "fp8"):
        assert cases[f"attention/decode/g2/b32/ctx1024/{form}"].num_bytes < 0.52 * plain
    window = cases["attention/decode/g2/b32/ctx8192/window"]
    assert window.num_bytes == plain


@pytest.mark.parametrize("kind", ["window", "int8", "one of", "chunk", "mixed"])
def test_attention_cases_are_right(kind: str, tmp_path: Path) -> None:
    session = small_session(tmp_path)
    cases = [case for case in attention_cases(session) if kind in case.name]
    assert cases
    for case in cases:
        assert measure_case(session, TorchKernels(), case)["error"] < 1e-5


class PlanningKernels(TorchKernels):
    """Keeps what a step is planned to be, and counts how often that is to be worked out."""

    num_plans = 0

    def paged_attention(
        self, q_THD: Tensor, cache: KVCache, metadata: AttentionMetadata, spec: AttentionSpec
    ) -> Tensor:
        self.num_plans += "plan" not in metadata.scratch
        metadata.scratch["plan"] = self
        return super().paged_attention(q_THD, cache, metadata, spec)


def test_each_call_of_attention_makes_its_plan(tmp_path: Path) -> None:
    session, kernels = small_session(tmp_path), PlanningKernels()
    case = next(attention_cases(session))
    operands = case.make(kernels, 0)
    for _ in range(3):
        case.run(kernels, operands)
    assert kernels.num_plans == 3
