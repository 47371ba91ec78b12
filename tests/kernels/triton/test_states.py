"""Triton's short convolutions against the reference."""

from __future__ import annotations

import pytest
import torch

from nanocore.kernels.torch.backend import TorchKernels
from nanocore.kernels.triton.states import TritonStates
from tests.kernels.state_case import ConvCase


@pytest.mark.parametrize("seed", range(12))
def test_convolutions_are_the_references_and_have_the_same_bits_however_cut(seed: int) -> None:
    case = ConvCase.draw(seed, torch.float32, most_tokens=40)
    whole = case.run(TritonStates(), case.whole)
    cut = case.run(TritonStates(), case.cuts(), num_padding=2)
    for one, other in zip(whole, cut, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(whole, case.run(TorchKernels(), case.whole), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
