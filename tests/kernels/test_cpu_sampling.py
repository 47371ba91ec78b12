"""The native best token against the torch reference, noise included."""

from __future__ import annotations

import os

import pytest
import torch

from nanocore.kernels.cpu.cpu_backend import CpuKernels
from nanocore.kernels.cpu.library import find_library
from nanocore.kernels.interface import Kernels, Noise
from nanocore.kernels.torch_backend import TorchKernels

REFERENCE = TorchKernels()


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    library = find_library()
    assert library is not None, "nanocore was installed without a C++ compiler"
    return CpuKernels(library, cores=sorted(os.sched_getaffinity(0))[:1])


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("width", [1, 3, 16, 17, 500, 4099])
def test_of_equal_logits_the_first_is_best(width: int, kernels: Kernels) -> None:
    logits = (2 * draw(20, width)).round()
    value, column = kernels.best_token(logits, 0)
    expected = REFERENCE.best_token(logits, 0)
    assert torch.equal(value, expected[0])
    assert column.tolist() == [row.tolist().index(row.max()) for row in logits]


def test_noise_is_that_of_the_reference_but_for_rounding(kernels: Kernels) -> None:
    logits = torch.zeros(4096, 1)
    noise = Noise(torch.ones(4096), torch.arange(4096) * 2**40 - 7, torch.arange(4096) * 31)
    value, _ = kernels.best_token(logits, 1000, noise)
    expected, _ = REFERENCE.best_token(logits, 1000, noise)
    torch.testing.assert_close(value, expected, atol=2e-6, rtol=2e-6)
    assert value.std() > 1.0


def test_rows_with_noise_take_the_token_that_the_reference_takes(kernels: Kernels) -> None:
    logits = 3 * draw(300, 1009)
    temperature = torch.tensor([0.0, 0.3, 1.0, 5.0]).repeat(75)
    noise = Noise(temperature, torch.arange(300) * 977, torch.arange(300))
    value, column = kernels.best_token(logits, 77, noise)
    expected_value, expected_column = REFERENCE.best_token(logits, 77, noise)
    torch.testing.assert_close(value, expected_value, atol=1e-5, rtol=1e-5)
    assert torch.equal(column, expected_column)
    assert not torch.equal(column[1::4], logits.argmax(dim=1)[1::4])


@pytest.mark.parametrize("place", [0, 15, 39])
@pytest.mark.parametrize("spoilt_by", [torch.nan, -torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [None, 0.0, 1.0])
def test_a_row_with_a_logit_that_is_not_finite_has_no_token(
    kernels: Kernels, temperature: float | None, spoilt_by: float, place: int
) -> None:
    logits = draw(3, 40)
    logits[::2, place] = spoilt_by
    logits[:, 20] = -torch.inf
    noise = None
    if temperature is not None:
        noise = Noise(torch.full((3,), temperature), torch.arange(3), torch.arange(3))
    value, column = kernels.best_token(logits, 0, noise)
    expected_value, expected_column = REFERENCE.best_token(logits, 0, noise)
    assert column.tolist() == expected_column.tolist() == [-1, expected_column[1].item(), -1]
    assert value[1] == pytest.approx(expected_value[1].item())
    assert not value[::2].isfinite().any()


def test_a_row_of_minus_infinity_has_no_token_and_one_of_the_largest_floats_has(
    kernels: Kernels,
) -> None:
    largest = torch.finfo(torch.float32).max
    logits = torch.stack([torch.full((40,), value) for value in (-torch.inf, largest, -largest)])
    logits[1:, 7] = -torch.inf
    assert kernels.best_token(logits, 0)[1].tolist() == [-1, 0, 0]
    assert REFERENCE.best_token(logits, 0)[1].tolist() == [-1, 0, 0]
