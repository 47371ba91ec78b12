"""Floats to four bits: errors, extremes, and what the native kernels make of the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanocore.kernels.cpu.cpu_backend import CpuKernels
from nanocore.kernels.cpu.library import find_library
from nanocore.kernels.group_quantization import quantize_groups


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def error_of(weight: Tensor, quantized: Tensor) -> float:
    return float((weight - quantized).norm() / weight.norm())


def test_a_search_errs_less_than_the_largest_magnitude_as_the_end_of_the_range() -> None:
    weight = draw(64, 256)
    groups = weight.unflatten(1, (8, 32))
    scale = groups.abs().amax(2, keepdim=True) / 7
    plain = ((groups / scale).round().clamp(-8, 7) * scale).flatten(1)
    error = error_of(weight, quantize_groups(weight).dequantize())
    assert 0.06 < error < 0.85 * error_of(weight, plain)


def test_numbers_of_four_bits_are_kept() -> None:
    q = torch.randint(-8, 8, (9, 96), generator=torch.Generator().manual_seed(0)).float()
    q[:, ::32] = -8
    weight = q * torch.tensor([0.25, 1.0, 3.0]).repeat_interleave(32)
    groups = quantize_groups(weight)
    assert torch.equal(groups.dequantize(), weight)
    assert torch.equal(groups.values_OI.float(), q + 8)


def test_tails_zeros_and_what_is_not_finite() -> None:
    weight = draw(5, 70)
    weight[1] = 0
    weight[2, 40] = torch.inf
    weight[3, 69] = torch.nan
    groups = quantize_groups(weight)
    assert (groups.values_OI.shape, groups.scale_OG.shape) == ((5, 70), (5, 3))
    out = groups.dequantize()
    assert not out[1].any()
    assert out.isnan().nonzero()[:, 0].unique().tolist() == [2, 3]
    assert out[2].isnan().nonzero().flatten().tolist() == list(range(32, 64))
    assert error_of(weight[0], out[0]) < 0.12


def test_the_native_kernels_find_the_same_numbers_to_the_bit() -> None:
    library = find_library()
    if library is None:
        pytest.skip("nanocore was installed without a C++ compiler")
    kernels = CpuKernels(library, keeps_activations=True)
    weight = draw(1024, 320) * draw(1024, 1)
    native = kernels.linear(torch.eye(320), kernels.pack_linear(weight, "int4")).t()
    assert torch.equal(native, quantize_groups(weight).dequantize())
