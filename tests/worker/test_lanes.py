"""A lane is a number that each of a row's tokens brings to every layer, wherever a step runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nanocore.kernels.interface import Kernels
from nanocore.kernels.step import Replay
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.layers.linear import StepContext
from nanocore.worker.placement import Placement
from nanocore.worker.step import lanes, step_graphs, step_memory
from nanocore.worker.step.lanes import Lane
from nanocore.worker.step.model_runner import ModelRunner
from nanocore.worker.step.stream import Stream
from tests.fake_device import FakeGraphRecorder, FakeStream
from tests.tiny_models import make_tiny_qwen3
from tests.worker.device_engine import DeviceKernels
from tests.worker.planned_rows import Asking, run, write_plans
from tests.worker.running import make_runner

GREEDY = EngineSamplingParams(temperature=0.0)


def scale_of(row: int) -> float:
    return 1.0 + row


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), head_dim=16)


@pytest.fixture
def _scale_lane(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A factor of each row's hidden states; rows have their numbers for seeds."""
    monkeypatch.setattr(step_graphs, "MIXED_TOKENS", (16, 40))

    lane = Lane("scale", torch.float32, 1.0, lambda new: scale_of(new.seed))
    lanes.LANES.append(lane)
    step_memory.layout_of.cache_clear()
    yield
    lanes.LANES.remove(lane)
    step_memory.layout_of.cache_clear()


class CapturingKernels(TorchKernels):
    """A host's kernels whose captures see lanes in memory of their own, as a program does."""

    def capture(self, compute: Replay, max_tokens: int, max_samples: int) -> Replay:
        return compute


def scaled(runner: ModelRunner, scale: Callable[[Tensor, StepContext], Tensor]) -> ModelRunner:
    forward = runner.model.forward

    def scaled_forward(x_TE: Tensor, caches: object, context: StepContext, index: Tensor) -> Tensor:
        return forward(x_TE * scale(x_TE, context), caches, context, index)

    runner.model.forward = scaled_forward  # type: ignore[method-assign]
    runner.capture(96)
    return runner


def by_lane(x_TE: Tensor, context: StepContext) -> Tensor:
    return context.lanes["scale"][: len(x_TE), None]


@pytest.mark.usefixtures("_scale_lane")
@pytest.mark.parametrize("where", ["host", "captured", "device", "graphs"])
@pytest.mark.parametrize("chunk", [5, 64])
def test_a_factor_for_each_row_reaches_its_tokens(folder: Path, where: str, chunk: int) -> None:
    rng = np.random.default_rng(2)
    requests = [Asking(rng.integers(0, 300, n).tolist(), GREEDY) for n in (9, 1, 12, 5)]
    kernels: Kernels = TorchKernels() if where == "host" else CapturingKernels()
    stream: Stream | None = None
    if where in ("device", "graphs"):
        recorder = FakeGraphRecorder() if where == "graphs" else None
        kernels, stream = DeviceKernels(), FakeStream(2, recorder)
    placement = Placement(torch.float32, torch.device("cpu"))
    runner = make_runner(folder, placement, kernels=kernels, stream=stream)
    found = run(scaled(runner, by_lane), write_plans(requests, chunk), 2 if stream else 1)
    assert runner.is_captured == (where in ("captured", "graphs"))
    for row, request in enumerate(requests):
        alone = make_runner(folder, placement, kernels=TorchKernels())
        alone = scaled(alone, lambda x_TE, _, row=row: torch.tensor(scale_of(row)))
        expected = run(alone, write_plans([request], 64)).tokens[0]
        assert found.tokens[row] == expected
        if row == 3:
            plain = make_runner(folder, placement, kernels=TorchKernels())
            assert run(plain, write_plans([request], 64)).tokens[0] != expected


def test_a_step_without_lanes_has_nothing_of_them(folder: Path) -> None:
    placement = Placement(torch.float32, torch.device("cpu"))
    runner = make_runner(folder, placement, kernels=TorchKernels())
    seen: list[dict[str, Tensor]] = []
    scaled(runner, lambda x_TE, context: (seen.append(context.lanes), torch.ones(1))[1])
    run(runner, write_plans([Asking([1, 2, 3], GREEDY)], 64))
    assert seen == [{}] * 4
