"""Norm, rotary embedding and activation against their formulas in float64."""

from __future__ import annotations

import torch

from nanocore.kernels.torch_backend import TorchKernels

KERNELS = TorchKernels()


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    x, weight = 5 * draw(7, 32), draw(32)
    x64 = x.double()
    expected = x64 / (x64.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    torch.testing.assert_close(KERNELS.rms_norm(x, weight, 1e-6).double(), expected)


def test_add_rms_norm_returns_the_sum_as_the_new_residual() -> None:
    x, residual, weight = draw(7, 32), 3 * draw(7, 32) + 1, draw(32)
    normed, total = KERNELS.add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, KERNELS.rms_norm(x + residual, weight, 1e-6))


def test_rope_turns_each_pair_by_its_angle() -> None:
    x = draw(5, 2, 8)
    angles = torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.1, 0.01, 0.001]))
    turned = KERNELS.rope(x, angles.cos(), angles.sin())
    pairs = torch.complex(x[..., :4].double(), x[..., 4:].double())
    expected = pairs * torch.exp(1j * angles.double())[:, None]
    torch.testing.assert_close(turned[..., :4].double(), expected.real)
    torch.testing.assert_close(turned[..., 4:].double(), expected.imag)


def test_silu_and_mul_gates_the_second_half_by_the_first() -> None:
    x = draw(3, 10)
    gate, up = x[:, :5].double(), x[:, 5:].double()
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(KERNELS.silu_and_mul(x).double(), expected)


def test_store_kv_writes_only_the_slots_named() -> None:
    k_cache, v_cache = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)
    k, v = draw(2, 2, 8), draw(2, 2, 8) + 1
    KERNELS.store_kv(k, v, k_cache, v_cache, torch.tensor([9, 2]))
    assert torch.equal(k_cache[2, 1], k[0])
    assert torch.equal(v_cache[0, 2], v[1])
    assert (k_cache != 0).any(-1).any(-1).sum() == 2
