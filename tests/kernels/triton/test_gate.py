"""Gates against torch."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanocore.kernels.triton.gate import gated

# numpy, which interprets the kernel, warns of what a GPU does in silence.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")


def expected(x: Tensor, activation: str) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 37), (5, 1024), (2, 1030), (0, 8)])
def test_gate_is_that_of_torch(activation: Literal["silu", "gelu"], rows: int, size: int) -> None:
    x = 4 * torch.randn(rows, 2 * size, generator=torch.Generator().manual_seed(size))
    out = gated(x, activation)
    assert out.shape == (rows, size)
    torch.testing.assert_close(out, expected(x, activation), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_large_values_saturate(activation: Literal["silu", "gelu"]) -> None:
    x = torch.tensor([[-1e4, -40.0, 40.0, 1e4, 3.0, 3.0, 3.0, 3.0]])
    torch.testing.assert_close(gated(x, activation), expected(x, activation), atol=1e-6, rtol=1e-6)


def test_rows_may_lie_apart() -> None:
    x = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))[::2, :44]
    torch.testing.assert_close(gated(x, "silu"), expected(x, "silu"))
