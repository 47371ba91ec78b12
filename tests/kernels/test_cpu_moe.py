"""Native experts: the reference's results, each token's own bits, and steps that record them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from benchmarks.attention_step import make_inputs
from nanocore.kernels.cpu.cpu_backend import CpuKernels
from nanocore.kernels.linear import Routing
from nanocore.kernels.linear_weight import Experts, TokenEmbedding
from nanocore.kernels.step import StepInputs
from tests.campaign import in_campaign
from tests.kernels.cpu_case import PagedCase, runnable_libraries
from tests.kernels.moe_case import ROUTERS, MoeCase, Stored, pack_experts, relative_error

ERRORS = {torch.float32: 1e-6, torch.bfloat16: 8e-3}
SHAPES = [(1, 8, 2), (3, 8, 8), (40, 16, 4), *in_campaign((200, 5, 1), (37, 3, 3))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "experts", "chosen"), SHAPES)
@pytest.mark.parametrize(("hidden", "inner"), [(64, 32), (70, 45)])
def test_floats_say_what_the_reference_says(
    kernels: CpuKernels,
    tokens: int,
    experts: int,
    chosen: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
) -> None:
    for has_shared in (False, True):
        case = MoeCase(
            tokens, experts, chosen, hidden, inner, dtype, not has_shared, has_shared, seed=tokens
        )
        stored = case.floats()
        expected = case.expected(stored)
        out = case.run(kernels, pack_experts(kernels, stored))
        assert out.dtype == dtype
        assert relative_error(out, expected) < ERRORS[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_says_what_the_reference_says(
    kernels: CpuKernels, router: dict[str, Any], dtype: torch.dtype
) -> None:
    case = MoeCase(40, 16, 4, dtype=dtype, seed=40, router=router)
    stored = case.floats()
    out = case.run(kernels, pack_experts(kernels, stored))
    assert relative_error(out, case.expected(stored)) < ERRORS[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("bits", "group_size", "has_zeros"),
    [(4, 32, False), (4, 64, True), (8, 128, False), *in_campaign((8, 32, True), (4, 128, False))],
)
def test_integers_say_what_their_numbers_stand_for(
    kernels: CpuKernels, bits: int, group_size: int, has_zeros: bool, dtype: torch.dtype
) -> None:
    """Within what activations of eight bits differ from floats, or without these."""
    case = MoeCase(29, 6, 3, hidden=192, inner=128, dtype=dtype, has_shared=True)
    stored = case.grouped(bits, group_size, has_zeros=has_zeros)
    expected = case.expected(stored)
    assert relative_error(case.run(kernels, pack_experts(kernels, stored)), expected) < 0.02
    exact = CpuKernels(kernels.library, keeps_activations=True)
    out = case.run(exact, pack_experts(exact, stored))
    assert relative_error(out, expected) < ERRORS[dtype]


@pytest.mark.parametrize("keeps_activations", [False, True])
@pytest.mark.parametrize(("quantization", "error"), [("int8", 0.03), ("int4", 0.15)])
def test_experts_are_quantized_when_they_are_packed(
    kernels: CpuKernels, quantization: str, error: float, keeps_activations: bool
) -> None:
    kernels = CpuKernels(kernels.library, keeps_activations=keeps_activations)
    case = MoeCase(40, 4, 2, hidden=192, inner=128, dtype=torch.bfloat16)
    stored = case.floats()
    out = case.run(kernels, pack_experts(kernels, stored, quantization))
    assert 1e-3 < relative_error(out, case.expected(stored)) < error


def test_each_projection_has_a_form_of_its_own(kernels: CpuKernels) -> None:
    case = MoeCase(20, 5, 2, hidden=192, inner=128)
    four, eight = case.grouped(4, 32, has_zeros=True), case.grouped(8, 64)

    def permuted(stored: Stored, seed: int) -> Stored:
        generator = torch.Generator().manual_seed(seed)
        return [
            tuple(
                replace(w, permutation_I=torch.randperm(w.in_features, generator=generator).int())  # type: ignore[type-var,union-attr]
                for w in weights
            )  # type: ignore[misc]
            for weights in stored
        ]

    mixed: Stored = [(a[0], b[1], b[2]) for a, b in zip(four, eight, strict=True)]
    for stored in (mixed, permuted(four, 1)):
        for rows in (slice(None), slice(7, 8)):
            out = case.run(kernels, pack_experts(kernels, stored), rows)
            assert relative_error(out, case.expected(stored)[rows]) < 0.02


def every_kind(kernels: CpuKernels, case: MoeCase) -> list[tuple[CpuKernels, Experts]]:
    weight_only = CpuKernels(kernels.library, keeps_activations=True)
    floats, integers = case.floats(), case.grouped(4, 32, has_zeros=True)
    return [
        *((kernels, pack_experts(kernels, floats, kind)) for kind in (None, "int8", "int4")),
        *((weight_only, pack_experts(weight_only, floats, kind)) for kind in ("int8", "int4")),
        (kernels, pack_experts(kernels, integers)),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_bits_are_its_own(kernels: CpuKernels, dtype: torch.dtype) -> None:
    """Alone, in chunks of any size, in another order, and beside other tokens."""
    case = MoeCase(61, 6, 3, hidden=96, inner=64, dtype=dtype, has_shared=True)
    for backend, experts in every_kind(kernels, case):
        whole = case.run(backend, experts)
        for size in (1, 2, 13):
            parts = [case.run(backend, experts, slice(i, i + size)) for i in range(0, 61, size)]
            assert torch.equal(torch.cat(parts), whole)
        order = torch.randperm(61, generator=torch.Generator().manual_seed(1))
        assert torch.equal(case.run(backend, experts, order), whole[order])
        many = order.repeat(8)
        assert torch.equal(case.run(backend, experts, many), whole[many])


def test_a_step_of_more_tokens_than_are_computed_at_once_is_no_different(
    kernels: CpuKernels,
) -> None:
    if kernels.library.instruction_set != next(iter(runnable_libraries())):
        pytest.skip("one instruction set, for its time")
    case = MoeCase(1200, 16, 8, hidden=1024, inner=32, dtype=torch.bfloat16)
    experts = pack_experts(kernels, case.floats())
    whole = case.run(kernels, experts)
    for first in (0, 599, 1199):
        assert torch.equal(case.run(kernels, experts, slice(first, first + 1))[0], whole[first])


def test_integers_have_equal_bits_in_every_instruction_set_with_fused_multiply_adds() -> None:
    case = MoeCase(23, 6, 3, hidden=96, inner=64, has_shared=True)
    stored = case.grouped(4, 32)
    said = [
        case.run(kernels, pack_experts(kernels, stored))
        for name, library in runnable_libraries().items()
        if name != "plain"
        for kernels in (CpuKernels(library),)
    ]
    assert all(torch.equal(out, said[0]) for out in said)


def chosen_experts(
    kernels: CpuKernels, logits_TX: Tensor, num_chosen: int, **settings: Any
) -> list[set[int]]:
    num_experts = logits_TX.shape[1]
    ones = torch.ones(1, 1)
    stored: Stored = [
        (ones.clone(), ones.clone(), torch.eye(num_experts)[:, expert : expert + 1].clone())
        for expert in range(num_experts)
    ]
    # Hidden size 1 cannot be, so the gate reads the first of many.
    wide = torch.zeros(1, num_experts)
    wide[0, 0] = 1.0
    stored = [(wide.clone(), wide.clone(), down) for _, _, down in stored]
    x = torch.ones(len(logits_TX), num_experts)
    routing = Routing(logits_TX, num_chosen, True, **settings)
    out = kernels.moe(x, pack_experts(kernels, stored), routing)
    return [set(row.nonzero().flatten().tolist()) for row in out]


def test_of_equally_likely_experts_the_smaller_number_is_taken(kernels: CpuKernels) -> None:
    logits = torch.tensor(
        [[0.0] * 6, [1, 2, 2, 2, 0, 2], [-5, 3, -5, -5, -5, -5], [0, 0, 1, 0, 1, 1]]
    )
    assert chosen_experts(kernels, logits, 2) == [{0, 1}, {1, 2}, {0, 1}, {2, 4}]
    bias = torch.tensor([-2.0, -1, -1, -3, -1, -3])
    assert chosen_experts(kernels, logits[:1], 2, score="sigmoid", bias_X=bias) == [{1, 2}]
    minus = torch.tensor([[-torch.inf, -torch.inf, 0.0, -torch.inf]])
    assert chosen_experts(kernels, minus, 1) == [{2}]


@pytest.mark.parametrize("place", [0, 5])
@pytest.mark.parametrize("router", [ROUTERS[2], ROUTERS[4]])
def test_a_token_without_scores_has_experts_that_there_are(
    kernels: CpuKernels, router: dict[str, Any], place: int
) -> None:
    case = MoeCase(20, 6, 2, router=router)
    experts = pack_experts(kernels, case.floats())
    expected = case.run(kernels, experts)
    case.logits[3, place] = torch.nan
    case.logits[4] = torch.nan
    out = case.run(kernels, experts)
    assert out[3:5].isnan().all()
    others = [i for i in range(20) if i not in (3, 4)]
    assert torch.equal(out[others], expected[others])


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 5])
def test_a_token_that_has_no_probabilities_spoils_no_other(
    kernels: CpuKernels, garbage: float, place: int
) -> None:
    case = MoeCase(20, 6, 2)
    experts = pack_experts(kernels, case.floats())
    expected = case.run(kernels, experts)
    case.logits[3, place] = garbage
    case.logits[4] = garbage
    case.x[7] = garbage
    out = case.run(kernels, experts)
    others = [i for i in range(20) if i not in (3, 4, 7)]
    assert torch.equal(out[others], expected[others])
    assert out[4].isnan().all()
    assert not out[7].isfinite().any()
    assert out[3].isnan().all() == (garbage != -torch.inf)


@pytest.mark.parametrize("kind", [None, "int8", "int4"])
def test_a_replay_is_the_kernels_called_one_by_one(kernels: CpuKernels, kind: str | None) -> None:
    case = MoeCase(12, 8, 3, hidden=64, inner=48, dtype=torch.bfloat16)
    experts = pack_experts(kernels, case.floats(), kind)
    router, shared = (kernels.pack_linear(case._draw(n, 64)) for n in (8, 64))
    embedding = TokenEmbedding(kernels.pack_linear(case._draw(50, 64)), 0, 1.0, torch.bfloat16)

    def compute(inputs: StepInputs) -> Tensor:
        x = kernels.begin_step(inputs.rows, embedding).x_TE
        assert x is not None
        for _ in range(2):
            x = kernels.moe(x, experts, Routing(kernels.linear(x, router), 3, False))
        return kernels.linear(x, shared)

    replay = kernels.capture(compute, 20, 20)
    assert replay is not None
    for num_tokens in (1, 12, 20):
        _, metadata = PagedCase([(num_tokens,)]).metadata(
            0, torch.zeros(1, 2, dtype=torch.int32), True
        )
        inputs = make_inputs(torch.arange(num_tokens) * 7 % 50, metadata)
        expected = compute(inputs)
        assert torch.equal(replay(inputs), expected)


def test_experts_share_pages(kernels: CpuKernels) -> None:
    """Hundreds of small weights would take twice their size in pages of 2 MiB."""
    weights = [kernels.pack_linear(torch.ones(64, 64)) for _ in range(20)]
    addresses = sorted(weight.data.data_ptr() for weight in weights)
    assert addresses[-1] - addresses[0] < 2 * 20 * weights[0].num_bytes
    assert all(weight.data.data_ptr() % 64 == 0 for weight in weights)
