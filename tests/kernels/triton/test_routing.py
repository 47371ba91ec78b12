"""Routing against transformers' routers, and the plan of products over experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanocore.kernels.linear import Routing
from nanocore.kernels.torch import linear as torch_linear
from nanocore.kernels.triton import routing as module
from nanocore.kernels.triton.routing import plan, route
from tests.kernels.moe_case import ROUTERS, draw_routing

# numpy, which interprets the kernels, warns of what a GPU does in silence.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("family", ["Qwen2Moe", "Qwen3Moe"])
@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize(("experts", "chosen"), [(60, 4), (128, 8), (7, 7), (3, 1)])
def test_tokens_choose_the_experts_that_transformers_chooses(
    family: str, experts: int, chosen: int, is_normalized: bool
) -> None:
    from transformers.models.qwen2_moe import modeling_qwen2_moe
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    modules = {"Qwen2Moe": modeling_qwen2_moe, "Qwen3Moe": modeling_qwen3_moe}
    config = SimpleNamespace(
        num_experts_per_tok=chosen,
        num_experts=experts,
        num_local_experts=experts,
        norm_topk_prob=is_normalized,
        hidden_size=16,
    )
    router = getattr(modules[family], f"{family}TopKRouter")(config)
    with torch.no_grad():
        router.weight.copy_(draw(experts, 16))
        logits, weights, ids = router(draw(9, 16))
    if logits.max() <= 1.0 and logits.min() >= 0.0:
        pytest.fail("these are probabilities, and not what our routing begins with")
    routing = Routing(logits.detach(), chosen, is_normalized)
    for chosen_ids, chosen_weights in (route(routing), torch_linear.route(routing)):
        assert torch.equal(chosen_ids.long(), ids)
        torch.testing.assert_close(chosen_weights, weights.float())


@pytest.mark.parametrize("is_normalized", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_tokens_choose_the_experts_that_lfm2_chooses(has_bias: bool, is_normalized: bool) -> None:
    from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter

    config = SimpleNamespace(
        num_experts_per_tok=4,
        num_experts=32,
        norm_topk_prob=is_normalized,
        hidden_size=16,
        routed_scaling_factor=1.3,
        use_expert_bias=has_bias,
    )
    router = Lfm2MoeTopKRouter(config)
    bias = draw(32) if has_bias else None
    with torch.no_grad():
        router.weight.copy_(draw(32, 16))
        logits, weights, ids = router(draw(9, 16), bias)
    routing = Routing(logits, 4, is_normalized, "sigmoid", bias, 1e-6, 1.3)
    for chosen_ids, chosen_weights in (route(routing), torch_linear.route(routing)):
        assert torch.equal(chosen_ids.long(), ids)
        torch.testing.assert_close(chosen_weights, weights)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(("experts", "chosen"), [(60, 4), (7, 7)])
def test_every_router_chooses_what_the_reference_chooses(
    router: dict[str, Any], experts: int, chosen: int
) -> None:
    routing = draw_routing(draw(9, experts), chosen, **router)
    ids, weights = route(routing)
    expected_ids, expected_weights = torch_linear.route(routing)
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights, expected_weights)


@pytest.mark.parametrize("experts", [5, 8, 60])
def test_of_equal_experts_the_smaller_numbers_come_first(experts: int) -> None:
    logits = torch.zeros(3, experts)
    logits[1, [1, 4]] = 2.0
    logits[2] = torch.arange(experts) // 2 * -0.5
    ids, weights = route(Routing(logits, 3, is_normalized=False))
    assert ids.tolist() == [[0, 1, 2], [1, 4, 0], [0, 1, 2]]
    probs = logits.softmax(-1)
    torch.testing.assert_close(weights, probs.gather(1, ids.long()))
    expected = torch_linear.route(Routing(logits, 3, is_normalized=False))[1]
    torch.testing.assert_close(weights, expected)  # whichever torch takes


def test_of_experts_with_equal_biases_the_smaller_numbers_come_first() -> None:
    bias = torch.tensor([-2.0, -1.0, -1.0, -3.0, -1.0])
    ids, weights = route(Routing(torch.zeros(1, 5), 4, False, "sigmoid", bias))
    assert ids.tolist() == [[1, 2, 4, 0]]
    assert weights.tolist() == [[0.5] * 4]


def test_experts_too_unlikely_for_float32_are_equal() -> None:
    logits = torch.tensor([[-500.0, 3.0, -300.0, -400.0]])
    ids, weights = route(Routing(logits, 3, is_normalized=True))
    assert ids.tolist() == [[1, 0, 2]]
    assert weights.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("garbage", "router"),
    [
        *((x, {"is_normalized": True}) for x in (torch.nan, -torch.nan, torch.inf)),
        *((torch.nan, router) for router in ROUTERS if router["is_normalized"]),
    ],
)
def test_a_token_that_is_not_a_number_takes_experts_that_there_are(
    garbage: float, router: dict[str, Any]
) -> None:
    logits = draw(3, 6)
    expected_ids, expected_weights = route(draw_routing(logits, 4, **router))
    logits[1, 3] = garbage
    ids, weights = route(draw_routing(logits, 4, **router))
    assert torch.equal(ids[::2], expected_ids[::2])
    assert torch.equal(weights[::2], expected_weights[::2])
    assert sorted(ids[1].tolist()) == ids[1].unique().tolist()
    assert (ids[1] >= 0).all()
    assert (ids[1] < 6).all()
    assert weights[1].isnan().all()


def test_logits_may_lie_apart_and_be_of_half_precision() -> None:
    logits = draw(4, 20).half()[:, :10]
    ids, weights = route(Routing(logits, 2, is_normalized=True))
    expected_ids, expected_weights = torch_linear.route(Routing(logits, 2, is_normalized=True))
    assert torch.equal(ids.long(), expected_ids)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, expected_weights)


def test_no_tokens_are_no_work() -> None:
    ids, weights = route(Routing(draw(1, 6)[:0], 2, is_normalized=True))
    assert (ids.shape, weights.shape) == ((0, 2), (0, 2))


def expected_plan(ids: list[int], num_experts: int, block_t: int) -> tuple[list[int], list[int]]:
    pair_of_row: list[int] = []
    expert_of_tile: list[int] = []
    for expert in range(num_experts):
        pairs = [pair for pair, chosen in enumerate(ids) if chosen == expert]
        num_tiles = -(-len(pairs) // block_t)
        pair_of_row += pairs + [-1] * (num_tiles * block_t - len(pairs))
        expert_of_tile += [expert] * num_tiles
    return pair_of_row, expert_of_tile


@pytest.mark.parametrize(
    ("num_pairs", "experts", "block_t"),
    [(1, 5, 16), (63, 16, 64), (64, 60, 16), (65, 60, 16), (256, 5, 16), (257, 16, 64),
     (600, 60, 16), (270, 300, 16)],
)  # fmt: skip
def test_pairs_are_laid_out_by_expert_in_their_order(
    num_pairs: int, experts: int, block_t: int
) -> None:
    generator = torch.Generator().manual_seed(num_pairs)
    ids = (experts * torch.rand(num_pairs, generator=generator) ** 2).int()  # some are popular
    pair_of_row, expert_of_tile, num_tiles = plan(ids[:, None], experts, block_t)
    rows, tiles = expected_plan(ids.tolist(), experts, block_t)
    assert num_tiles.tolist() == [len(tiles)]
    assert pair_of_row[: len(rows)].tolist() == rows
    assert expert_of_tile[: len(tiles)].tolist() == tiles


def test_the_number_of_programs_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(0, 9, (700, 1), generator=torch.Generator().manual_seed(0)).int()
    plans = []
    for most in (1, 3, 128):
        monkeypatch.setattr(module, "MAX_SPANS", most)
        monkeypatch.setattr(module, "MIN_SPAN", 64)
        pair_of_row, expert_of_tile, num_tiles = plan(ids, 9, 16)
        plans.append((pair_of_row[: 16 * num_tiles], expert_of_tile[:num_tiles]))
    for rows, tiles in plans[1:]:
        assert torch.equal(rows, plans[0][0])
        assert torch.equal(tiles, plans[0][1])


@pytest.mark.parametrize("num_pairs", [64, 1024])
def test_pairs_are_looked_at_twice_however_many_experts_there_are(
    monkeypatch: pytest.MonkeyPatch, num_pairs: int
) -> None:
    """Counted, and put in their places; 64 at a time."""
    num_looks = 0
    assert module.plan_step(64) == 64
    load = module.load_experts

    def counted(*args: object) -> object:
        nonlocal num_looks
        num_looks += 64
        return load(*args)

    monkeypatch.setattr(module, "load_experts", counted)
    ids = torch.randint(0, 60, (num_pairs, 1), generator=torch.Generator().manual_seed(0)).int()
    plan(ids, 60, 16)
    assert num_looks == 2 * num_pairs
