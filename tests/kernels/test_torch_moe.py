"""Mixture of experts against a loop over tokens and their choices in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanocore.kernels.linear_weight import StackedExperts
from nanocore.kernels.torch_backend import moe as moe_of


def moe(x: Tensor, gate_up: Tensor, down: Tensor, *rest: Any) -> Tensor:
    return moe_of(x, StackedExperts(gate_up, down), *rest)


def make(tokens: int, experts: int, chosen: int, hidden: int, inner: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens + experts)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    ids = torch.rand(tokens, experts, generator=generator).topk(chosen).indices
    weights = torch.rand(tokens, chosen, generator=generator)
    gate_up, down = draw(experts, 2 * inner, hidden), draw(experts, hidden, inner)
    return [draw(tokens, hidden), gate_up, down, ids, weights]


def expected(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    activation: Callable[[Tensor], Tensor] = F.silu,
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            out[token] += weight * (down[expert].double() @ (activation(gate) * up))
    return out


@pytest.mark.parametrize(("hidden", "inner"), [(16, 8), (7, 5), (16, 3)])
@pytest.mark.parametrize(("experts", "chosen"), [(4, 2), (16, 4), (3, 3), (5, 1)])
@pytest.mark.parametrize("tokens", [0, 1, 3, 40])
def test_each_token_gets_its_experts_by_its_weights(
    tokens: int, experts: int, chosen: int, hidden: int, inner: int
) -> None:
    args = make(tokens, experts, chosen, hidden, inner)
    torch.testing.assert_close(moe(*args).double(), expected(*args), atol=1e-4, rtol=1e-5)


def test_experts_may_have_another_activation() -> None:
    args = make(20, 4, 2, 16, 8)
    reference = expected(*args, activation=partial(F.gelu, approximate="tanh"))
    out = moe(*args, "gelu").double()
    torch.testing.assert_close(out, reference, atol=1e-4, rtol=1e-5)


def test_all_tokens_may_choose_the_same_experts() -> None:
    args = make(20, 8, 2, 16, 8)
    args[3][:] = torch.tensor([6, 1])
    torch.testing.assert_close(moe(*args).double(), expected(*args), atol=1e-4, rtol=1e-5)


def test_bfloat16_rounds_as_the_chain_of_linears_does() -> None:
    x, gate_up, down, ids, weights = make(12, 8, 2, 32, 16)
    args = [x.bfloat16(), (gate_up / 8).bfloat16(), (down / 8).bfloat16(), ids, weights]
    out = moe(*args)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected(*args), atol=0.03, rtol=0.03)


def test_the_order_of_a_tokens_choices_and_of_the_tokens_does_not_mix_them_up() -> None:
    x, gate_up, down, ids, weights = make(20, 8, 4, 16, 8)
    out = moe(x, gate_up, down, ids, weights)
    mirrored = moe(x.flip(0), gate_up, down, ids.flip(0, 1), weights.flip(0, 1))
    torch.testing.assert_close(mirrored.flip(0), out)


def test_shares_of_the_inner_size_sum_to_the_whole() -> None:
    x, gate_up, down, ids, weights = make(9, 4, 2, 16, 16)
    gate, up = gate_up.chunk(2, dim=1)
    parts = [
        moe(x, torch.cat((gate[:, part], up[:, part]), 1), down[..., part], ids, weights)
        for part in (slice(0, 8), slice(8, 16))
    ]
    whole = moe(x, gate_up, down, ids, weights)
    torch.testing.assert_close(parts[0] + parts[1], whole, atol=1e-4, rtol=1e-5)
