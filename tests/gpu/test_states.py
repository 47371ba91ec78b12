"""On a CUDA device: Triton's layers with states in bfloat16, as compiled, beside the reference.

To be run with TRITON_INTERPRET=0, see `tests/conftest.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nanocore.kernels.torch.backend import TorchKernels
from nanocore.kernels.triton.states import TritonStates
from tests.gpu.targets import CUDA_MARKS
from tests.gpu.tensors import DEVICE, DTYPE, close
from tests.kernels.state_case import KeptCase, conv_case, delta_case
from tests.kernels.test_states import check

pytestmark = CUDA_MARKS

KERNELS = TritonStates()
REFERENCE = TorchKernels()


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def draw(*shape: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, device=DEVICE).to(DTYPE)


@pytest.mark.parametrize("kind", ["short_conv", "silu_conv"])
@pytest.mark.parametrize("seed", range(6))
def test_convolutions_have_the_same_bits_however_cut(seed: int, kind: str) -> None:
    case = conv_case(seed, DTYPE, kind, device=str(DEVICE))
    check(case, KERNELS, 3e-2, num_padding_seqs=2)


@pytest.mark.parametrize("dims", [(128, 128), (48, 80), (64, 32)])
@pytest.mark.parametrize("seed", [0, 5, 9, 17])
def test_delta_rules_have_the_same_bits_however_cut(seed: int, dims: tuple[int, int]) -> None:
    case = delta_case(seed, DTYPE, dims=dims, device=str(DEVICE))
    check(case, KERNELS, 3e-2, num_padding_seqs=2)


def test_a_delta_rule_of_float32_is_nearly_the_references() -> None:
    case = delta_case(9, torch.float32, dims=(128, 128), device=str(DEVICE))
    check(case, KERNELS, 1e-4, num_padding_seqs=2)


@pytest.mark.parametrize(("rows", "heads"), [(1, 16), (300, 32)])
def test_gates(rows: int, heads: int) -> None:
    x, gate, weight = draw(rows, heads * 128), draw(rows, 3 * heads * 128), draw(128)
    gate = gate[:, 2 * heads * 128 :]
    close(KERNELS.gated_norm(x, gate, weight, 1e-6), REFERENCE.gated_norm(x, gate, weight, 1e-6))
    close(KERNELS.sigmoid_gate(x, gate), REFERENCE.sigmoid_gate(x, gate))


@pytest.mark.parametrize("size", [1024, 5120])
def test_what_is_joined_and_kept_is_the_references(size: int) -> None:
    KeptCase.draw(1, size, DTYPE, device=str(DEVICE)).check(KERNELS, REFERENCE)
