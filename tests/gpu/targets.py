"""Where the same tests of steps run: on a CUDA device, and without one on the fake device."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from nanocore.kernels.interface import Kernels
from nanocore.kernels.triton.triton_backend import TritonKernels
from nanocore.worker.communication.communicator import Communicator
from nanocore.worker.layers.decoder import DecoderModel
from nanocore.worker.step.cuda_stream import CudaGraphCapture, CudaStream
from nanocore.worker.step.stream import Stream
from tests.fake_device import FakeGraphRecorder, FakeStream
from tests.worker.device_engine import DeviceKernels, Engine, load_model


@dataclass(frozen=True)
class Target:
    """A device. make_kernels: those of a new engine. name: "cuda", or "cpu" for the fake."""

    name: str
    make_kernels: Callable[[], Kernels]

    @property
    def device(self) -> torch.device:
        return torch.device(self.name, 0) if self.name == "cuda" else torch.device(self.name)

    def load(
        self, folder: Path, dtype: torch.dtype = torch.float32, tp: Communicator | None = None
    ) -> DecoderModel:
        return load_model(folder, str(self.device), dtype, tp=tp)

    def stream(self, depth: int, has_graphs: bool) -> Stream:
        if self.name == "cuda":
            return CudaStream(depth, self.device, CudaGraphCapture() if has_graphs else None)
        return FakeStream(depth, FakeGraphRecorder() if has_graphs else None)

    def engine(
        self, model: DecoderModel, depth: int = 2, *, has_graphs: bool = True, num_blocks: int = 200
    ) -> Engine:
        """An engine of a model that was loaded there. depth: steps in flight."""
        kernels, stream = self.make_kernels(), self.stream(depth, has_graphs)
        return Engine(model, depth, num_blocks=num_blocks, kernels=kernels, stream=stream)


CUDA = Target("cuda", lambda: TritonKernels(torch.device("cuda", 0)))
FAKE = Target("cpu", DeviceKernels)

CUDA_MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "0", reason="Triton interprets"),
]
"""Of tests that need a device, and kernels compiled for it."""

TARGETS = [
    pytest.param(CUDA, id="cuda", marks=CUDA_MARKS),
    pytest.param(
        FAKE,
        id="fake",
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
    ),
]
"""Parameters of a test that runs on the one that is there."""
