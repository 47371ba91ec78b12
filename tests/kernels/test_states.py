"""Short convolutions: the reference against torch's, and native ones against the reference."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nanocore.kernels.cpu.cpu_backend import CpuKernels
from nanocore.kernels.torch.backend import TorchKernels
from tests.kernels.state_case import ConvCase

SEEDS = range(25)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_reference_is_torchs_convolution_however_it_is_cut(seed: int) -> None:
    case = ConvCase.draw(seed, torch.float32)
    taps_LC, bias_C = case.filters.taps_LC, case.filters.bias_C
    num_taps, channels = taps_LC.shape
    for x, out in zip(case.x, case.run(TorchKernels(), case.cuts(), num_padding=3), strict=True):
        b, c, u = x.chunk(3, 1)
        weight = taps_LC.t().unsqueeze(1)
        inputs = F.pad((b * u).t(), (num_taps - 1, 0))
        expected = c * F.conv1d(inputs, weight, bias_C, groups=channels).t()
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", SEEDS)
def test_native_convolutions_are_the_references_and_have_the_same_bits_however_cut(
    seed: int, dtype: torch.dtype, kernels: CpuKernels
) -> None:
    case = ConvCase.draw(seed, dtype)
    whole, cut = case.run(kernels, case.whole), case.run(kernels, case.cuts(), num_padding=2)
    for one, other in zip(whole, cut, strict=True):
        assert torch.equal(one, other)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for one, other in zip(whole, case.run(TorchKernels(), case.whole), strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
