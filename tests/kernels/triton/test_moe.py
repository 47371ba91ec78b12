"""Experts against the torch reference and a token's own bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nanocore.kernels.linear import Routing, SharedExpert
from nanocore.kernels.linear_weight import StackedExperts
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.kernels.torch.linear import add_shared, weighted_experts
from nanocore.kernels.triton.moe import choose_tile, moe
from nanocore.kernels.triton.triton_backend import TritonKernels
from tests.campaign import in_campaign
from tests.kernels.triton import moe_cases
from tests.kernels.triton.compilation import SHARED_BYTES

REFERENCE = TorchKernels()

# numpy, which interprets the kernels, warns of what a GPU does in silence.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")


def make(tokens: int, experts: int, chosen: int, hidden: int, inner: int) -> list[Any]:
    generator = torch.Generator().manual_seed(tokens + experts)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    ids = torch.rand(tokens, experts, generator=generator).topk(chosen).indices
    weights = torch.rand(tokens, chosen, generator=generator)
    gate_up, down = draw(experts, 2 * inner, hidden) / 4, draw(experts, hidden, inner) / 4
    return [draw(tokens, hidden), StackedExperts(gate_up, down), ids, weights]


def assert_as_reference(args: list[Any]) -> None:
    torch.testing.assert_close(moe(*args), weighted_experts(*args), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("hidden", "inner"), [*in_campaign((16, 8), (7, 5)), (40, 35)])
@pytest.mark.parametrize(("experts", "chosen"), [(16, 4), (5, 1), *in_campaign((4, 2), (3, 3))])
@pytest.mark.parametrize("tokens", [0, 1, 3, 40])
def test_each_token_gets_its_experts_by_its_weights(
    tokens: int, experts: int, chosen: int, hidden: int, inner: int
) -> None:
    assert_as_reference(make(tokens, experts, chosen, hidden, inner))


def test_experts_may_have_another_activation() -> None:
    args = make(20, 4, 2, 16, 8)
    out = moe(*args, "gelu")
    torch.testing.assert_close(out, weighted_experts(*args, "gelu"), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(out, moe(*args), atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_shared_expert_is_added_behind_its_gate(dtype: torch.dtype) -> None:
    args = make(9, 4, 2, 16, 8)
    x, experts = args[:2]
    args[0] = x.to(dtype)
    args[1] = StackedExperts(experts.gate_up_XIE.to(dtype), experts.down_XEI.to(dtype))
    generator = torch.Generator().manual_seed(8)
    gate, out = (torch.randn(9, n, generator=generator).to(dtype) for n in (1, 40))
    shared = SharedExpert(gate, out[:, :16])
    chosen = moe(*args)
    with_shared = moe(*args, shared=shared)
    expected = add_shared(chosen, shared)
    torch.testing.assert_close(with_shared, expected)
    assert not torch.allclose(with_shared, chosen, atol=1e-2)


def test_what_the_backend_says_of_logits_is_what_torch_says() -> None:
    x, experts, *_ = make(9, 6, 2, 16, 8)
    generator = torch.Generator().manual_seed(8)
    logits, gate, out = (torch.randn(9, n, generator=generator) for n in (6, 1, 16))
    args = x, experts, Routing(logits, 3, is_normalized=True), SharedExpert(gate, out), "gelu"
    ours, theirs = TritonKernels(torch.device("cpu")).moe(*args), TorchKernels().moe(*args)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_all_tokens_may_choose_the_same_experts() -> None:
    args = make(50, 8, 2, 16, 8)
    args[2][:] = torch.tensor([6, 1])
    assert_as_reference(args)


def test_more_pairs_than_one_program_lays_out() -> None:
    assert_as_reference(make(200, 4, 3, 4, 2))


def test_tokens_may_lie_apart() -> None:
    args = make(12, 4, 2, 16, 8)
    args[0] = torch.cat((args[0], args[0] + 9), dim=1)[::2, :16]
    args[2:] = args[2][::2], args[3][::2]
    assert_as_reference(args)


@pytest.mark.usefixtures("products_in_order")
def test_a_token_has_the_same_bits_alone_and_in_a_crowd() -> None:
    args = make(40, 8, 3, 24, 12)
    out = moe(*args)
    for token in (0, 17, 39):
        alone = [x[token : token + 1] if i != 1 else x for i, x in enumerate(args)]
        assert torch.equal(moe(*alone)[0], out[token])


@pytest.mark.parametrize("garbage", [torch.nan, *in_campaign(torch.inf)])
def test_padding_spoils_no_other_token(garbage: float) -> None:
    args = make(20, 4, 2, 16, 8)
    expected = moe(*args)
    args[0][15:] = garbage
    args[3][15:] = garbage
    args[2][17:] = torch.tensor([-7, 2**40])  # not experts
    assert torch.equal(moe(*args)[:15], expected[:15])


@pytest.mark.parametrize("is_gated", [False, True])
def test_batch_invariant_tiles_do_not_depend_on_the_number_of_tokens(is_gated: bool) -> None:
    for room in SHARED_BYTES.values():
        tiles = [
            {choose_tile(n, 128, is_gated, fixed, room) for n in (8, 8000, 10**6)}
            for fixed in (True, False)
        ]
        assert [len(of) for of in tiles] == [1, 3]


@pytest.mark.parametrize("room", sorted(set(SHARED_BYTES.values())))
def test_tiles_of_all_models_fit_the_shared_memory_of_all_gpus(room: int) -> None:
    variants = moe_cases.variants(room)
    assert len(variants) == 6
    for tile, is_gated in variants:
        assert tile.shared_bytes(2, is_gated) <= room
        assert tile.num_stages > 2, "nothing is loaded ahead of its use"


@pytest.mark.parametrize("num_pairs", [8, 8000, 10**6])
@pytest.mark.parametrize("room", [48 << 10, *sorted(set(SHARED_BYTES.values()))])
def test_both_products_have_tiles_of_the_same_rows(num_pairs: int, room: int) -> None:
    tiles = [choose_tile(num_pairs, 128, is_gated, False, room) for is_gated in (False, True)]
    assert tiles[0].block_t == tiles[1].block_t
