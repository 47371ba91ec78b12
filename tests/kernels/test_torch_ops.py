"""Norm, rotary embedding and activation against their formulas in float64."""

from __future__ import annotations

import pytest
import torch

from nanocore.kernels import torch_attention
from nanocore.kernels.torch_attention import store_kv
from nanocore.kernels.torch_backend import TorchKernels, rope
from tests.kernels.layered_cache import layered

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
    turned = rope(x, angles.cos(), angles.sin())
    pairs = torch.complex(x[..., :4].double(), x[..., 4:].double())
    expected = pairs * torch.exp(1j * angles.double())[:, None]
    torch.testing.assert_close(turned[..., :4].double(), expected.real)
    torch.testing.assert_close(turned[..., 4:].double(), expected.imag)


def test_silu_of_the_first_half_gates_the_second() -> None:
    x = draw(3, 10)
    gate, up = x[:, :5].double(), x[:, 5:].double()
    expected = gate / (1 + (-gate).exp()) * up
    itself = KERNELS.pack_linear(torch.eye(10))
    actual = KERNELS.gated_linear(x, itself)
    torch.testing.assert_close(actual.double(), expected)


def test_activations_without_a_gate() -> None:
    x = 3 * draw(3, 10)
    silu, gelu = KERNELS.activate(x, "silu").double(), KERNELS.activate(x, "gelu").double()
    x = x.double()
    torch.testing.assert_close(silu, x / (1 + (-x).exp()))
    inner = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    torch.testing.assert_close(gelu, 0.5 * x * (1 + inner.tanh()))


def test_store_kv_writes_only_the_slots_named() -> None:
    cache = layered(torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8))
    k, v = draw(2, 2, 8), draw(2, 2, 8) + 1
    store_kv(k, v, cache, torch.tensor([9, 2]))
    assert torch.equal(cache.k_NSKD[2, 1], k[0])
    assert torch.equal(cache.v_NSKD[0, 2], v[1])
    assert (cache.k_NSKD != 0).any(-1).any(-1).sum() == 2


@pytest.mark.parametrize("slots", [[-1, 9, -1, 0], [5, -1], [-1, -1, -1], [3, 11]])
def test_a_slot_of_minus_one_writes_nothing(slots: list[int]) -> None:
    k, v = draw(len(slots), 2, 8), draw(len(slots), 2, 8) + 1
    expected_k, expected_v = torch.full((12, 2, 8), 7.0), torch.full((12, 2, 8), 7.0)
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected_k[slot], expected_v[slot] = k[token], v[token]
    cache = layered(torch.full((3, 4, 2, 8), 7.0), torch.full((3, 4, 2, 8), 7.0))
    store_kv(k, v, cache, torch.tensor(slots))
    assert torch.equal(cache.k_NSKD.flatten(0, 1), expected_k)
    assert torch.equal(cache.v_NSKD.flatten(0, 1), expected_v)

    written = torch.full((3, 4, 2, 8), 7.0)  # as on devices whose memory the host does not see
    torch_attention.repeating_writer(torch.tensor(slots), block_size=4)(written, k)
    assert torch.equal(written.flatten(0, 1), expected_k)


def test_the_weights_dtype_decides_where_rms_norm_rounds() -> None:
    x, weight = (5 * draw(7, 32)).bfloat16(), draw(32).bfloat16().float()
    normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    once = (normed * weight).bfloat16()
    twice = (normed.bfloat16().float() * weight).bfloat16()
    assert not torch.equal(once, twice)
    assert torch.equal(KERNELS.rms_norm(x, weight, 1e-6), once)
    assert torch.equal(KERNELS.rms_norm(x, weight.bfloat16(), 1e-6), twice)


def test_rope_narrower_than_the_head_leaves_the_rest_alone() -> None:
    x, angles = draw(5, 2, 12), draw(5, 3)
    turned = rope(x, angles.cos(), angles.sin())
    torch.testing.assert_close(turned[..., :6], rope(x[..., :6], angles.cos(), angles.sin()))
    assert torch.equal(turned[..., 6:], x[..., 6:])


def test_gelu_gates_by_the_tanh_approximation() -> None:
    x = draw(3, 10)
    gate, up = x[:, :5].double(), x[:, 5:].double()
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    expected = 0.5 * gate * (1 + inner.tanh()) * up
    itself = KERNELS.pack_linear(torch.eye(10))
    actual = KERNELS.gated_linear(x, itself, activation="gelu")
    torch.testing.assert_close(actual.double(), expected)
