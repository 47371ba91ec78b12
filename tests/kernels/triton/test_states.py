"""Triton's layers with states against the reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nanocore.kernels.torch.backend import TorchKernels
from nanocore.kernels.triton.states import TritonStates
from tests.kernels.state_case import KeptCase, conv_case, delta_case
from tests.kernels.test_states import check

KERNELS = TritonStates()
REFERENCE = TorchKernels()


@pytest.fixture(autouse=True)
def _new_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


def draw(*shape: int) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("kind", ["short_conv", "silu_conv"])
@pytest.mark.parametrize("seed", range(6))
def test_convolutions_are_the_references_and_have_the_same_bits_however_cut(
    seed: int, kind: str
) -> None:
    case = conv_case(seed, torch.float32, kind, most_tokens=24)
    check(case, KERNELS, 1e-5, num_padding_seqs=2)


@pytest.mark.parametrize(
    ("seed", "dims"),
    [(0, None), (2, None), (12, None), (16, None), (1, (48, 80)), (16, (48, 80)), (0, (80, 24))],
)
def test_delta_rules_are_the_references_and_have_the_same_bits_however_cut(
    seed: int, dims: tuple[int, int] | None
) -> None:
    """Both kinds of heads are among them, and dimensions that are no powers of two."""
    case = delta_case(seed, torch.float32, most_tokens=20, dims=dims)
    check(case, KERNELS, 1e-4, num_padding_seqs=2)


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("dim", [1, 48, 128])
def test_gated_norm_is_the_references(rows: int, dim: int) -> None:
    x, weight = draw(rows, 3 * dim), draw(dim)
    gate = draw(rows, 5 * dim)[:, dim : 4 * dim]
    torch.testing.assert_close(
        KERNELS.gated_norm(x, gate, weight, 1e-6),
        REFERENCE.gated_norm(x, gate, weight, 1e-6),
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("size", [1, 1000, 1030])
def test_sigmoid_gate_is_the_references(rows: int, size: int) -> None:
    x, gate = draw(rows, size), draw(rows, size + 7)[:, 7:]
    torch.testing.assert_close(KERNELS.sigmoid_gate(x, gate), REFERENCE.sigmoid_gate(x, gate))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [24, 1030])
def test_what_is_joined_and_kept_is_the_references(seed: int, size: int) -> None:
    KeptCase.draw(seed, size, torch.float32).check(KERNELS, REFERENCE)
