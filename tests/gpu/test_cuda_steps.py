"""On a CUDA device: real streams and graphs, with the workloads of the fake ones.

In float32, where Triton's kernels compute exactly enough for tokens to be those of a CPU. To be run
with TRITON_INTERPRET=0, see `tests/conftest.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from nanocore.kernels.triton.triton_backend import TritonKernels
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker import step_graphs
from nanocore.worker.cuda_stream import CudaGraphRecorder, CudaStream
from nanocore.worker.model_runner import DeviceQueue
from tests.tiny_models import make_tiny_qwen3
from tests.worker.device_engine import Engine, Wish, expected, load_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "0", reason="Triton interprets"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), head_dim=64)


def make_wishes() -> list[Wish]:
    rng = np.random.default_rng(3)
    samplings = [
        EngineSamplingParams(temperature=0.0),
        EngineSamplingParams(temperature=0.8),
        EngineSamplingParams(temperature=1.1, top_k=20, top_p=0.9),
    ]
    return [
        Wish(rng.integers(0, 380, length).tolist(), 12, samplings[i % 3])
        for i, length in enumerate([1, 5, 60, 33, 17, 4, 40])
    ]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("has_graphs", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_cuda_steps_give_the_tokens_of_a_cpu(
    folder: Path,
    depth: int,
    has_graphs: bool,
    batch_invariant: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_graphs, "_MIXED_TOKENS", (8, 24))
    device = torch.device("cuda", 0)
    queue = DeviceQueue(CudaStream(depth, device), CudaGraphRecorder() if has_graphs else None)
    kernels = TritonKernels(device, batch_invariant)
    model = load_model(folder, "cuda")
    engine = Engine(model, depth, kernels=kernels, queue=queue)
    wishes = make_wishes()
    assert engine.run(wishes) == expected(load_model(folder), wishes)
