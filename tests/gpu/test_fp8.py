"""fp8 weights on a CUDA device: torch's own product of them, alone and in a graph.

To be run with TRITON_INTERPRET=0, see `tests/conftest.py`.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from nanocore.kernels.torch.backend import TorchKernels
from nanocore.kernels.triton.triton_backend import TritonKernels
from nanocore.worker.devices import check_quantized_linear
from nanocore.worker.step.cuda_stream import CudaGraphCapture

HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_FP8, reason="no CUDA device with fp8"),
    pytest.mark.skipif(os.environ["TRITON_INTERPRET"] != "0", reason="Triton interprets"),
]

REFERENCE = TorchKernels()


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to("cuda", torch.bfloat16)


def test_the_device_has_such_a_product() -> None:
    device = torch.device("cuda", 0)
    check_quantized_linear("fp8", TritonKernels(device), torch.bfloat16, device)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("outs", "ins"), [(16, 16), (6144, 2304)])
@pytest.mark.parametrize("rows", [1, 5, 17, 64, 1000])
def test_a_layer_is_that_of_the_reference(rows: int, outs: int, ins: int, has_bias: bool) -> None:
    kernels, x = TritonKernels(torch.device("cuda", 0)), draw(rows, ins)
    weight, bias = kernels.pack_linear(draw(outs, ins), "fp8"), draw(outs) if has_bias else None
    out, expected = (k.linear(x, weight, bias) for k in (kernels, REFERENCE))
    tolerance = 0.02 * ins**0.5
    torch.testing.assert_close(out, expected, rtol=0.02, atol=tolerance)


def test_a_graph_replays_it_on_other_numbers() -> None:
    kernels, x = TritonKernels(torch.device("cuda", 0)), draw(40, 1024)
    weight = kernels.pack_linear(draw(6144, 1024), "fp8")
    graph_capture = CudaGraphCapture()
    graph_capture.begin_set()
    with torch.inference_mode():
        result, replay = graph_capture.capture(lambda: kernels.gated_linear(x, weight))
        x.copy_(draw(41, 1024)[1:] * 3)
        x[7] = torch.nan
        replay()
        expected = kernels.gated_linear(x, weight)
    torch.testing.assert_close(result, expected, equal_nan=True)
    assert result[7].isnan().all()
