"""On a CUDA device: real streams and graphs, with the workloads of the fake ones.

In float32, where Triton's kernels compute exactly enough for tokens to be those of a CPU. To be run
with TRITON_INTERPRET=0, see `tests/conftest.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from nanocore.kernels.triton.triton_backend import TritonKernels
from nanocore.worker.device import step_graphs
from nanocore.worker.device.cuda_stream import CudaGraphRecorder, CudaStream
from nanocore.worker.model_runner import DeviceQueue
from tests.tiny_models import make_tiny_qwen3
from tests.worker.device_engine import Engine, expected, load_model, make_wishes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "0", reason="Triton interprets"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3(tmp_path_factory.mktemp("model"), head_dim=64)


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
    monkeypatch.setattr(step_graphs, "MIXED_TOKENS", (8, 24))
    device = torch.device("cuda", 0)
    queue = DeviceQueue(CudaStream(depth, device), CudaGraphRecorder() if has_graphs else None)
    kernels = TritonKernels(device, batch_invariant)
    model = load_model(folder, "cuda")
    engine = Engine(model, depth, kernels=kernels, queue=queue)
    wishes = make_wishes(1, 5, 60, 33, 17, 4, 40, max_tokens=12)
    assert engine.run(wishes) == expected(load_model(folder), wishes)
