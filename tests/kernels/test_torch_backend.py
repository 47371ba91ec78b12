"""The reference backend against plain formulas: norms, experts, attention, and the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanocore.kernels.attention import AttentionSpec
from nanocore.kernels.linear_weight import StackedExperts
from nanocore.kernels.torch import attention as torch_attention
from nanocore.kernels.torch.attention import rope, store_kv
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.kernels.torch.linear import weighted_experts
from tests.campaign import examples
from tests.kernels.layered_cache import layered
from tests.kernels.paged_case import HEAD_DIM, PLAIN, PagedCase

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


def moe(x: Tensor, gate_up: Tensor, down: Tensor, *rest: Any) -> Tensor:
    return weighted_experts(x, StackedExperts(gate_up, down), *rest)


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


MIXED = [(5, 1), (31, 1), (1, 1), (2, 2), (40, 7), (64, 64), (48, 33)]


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(
    "seqs",
    [
        [(1, 1)],
        [(17, 17)],
        [(16, 16), (32, 16), (33, 16)],
        [(1, 1), (16, 1), (17, 1), (40, 1)],
        MIXED,
    ],
)
def test_mixed_batches_equal_dense_attention(
    seqs: list[tuple[int, int]], block_size: int, heads: int, kv_heads: int
) -> None:
    case = PagedCase(seqs, block_size, heads, kv_heads, seed=len(seqs) + block_size)
    torch.testing.assert_close(case.run().double(), case.expected(), atol=2e-5, rtol=2e-5)


@st.composite
def paged_cases(draw: st.DrawFn) -> PagedCase:
    lengths = st.integers(1, 50)
    decodes = [(length, 1) for length in draw(st.lists(lengths, max_size=4))]
    chunks = [
        (past + count, count)
        for past, count in draw(
            st.lists(st.tuples(st.integers(0, 50), st.integers(2, 30)), max_size=3)
        )
    ]
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4]))
    spec = AttentionSpec(
        scale=draw(st.sampled_from([HEAD_DIM**-0.5, 0.5])),
        window=draw(st.sampled_from([0, 1, 2, 3, 4, 5, 8, 9, 16, 33, 100])),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])),
    )
    return PagedCase(
        seqs=decodes + chunks or [(3, 3)],
        block_size=draw(st.sampled_from([1, 2, 4, 8])),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        seed=draw(st.integers(0, 1000)),
        spec=spec,
        kv_cache=draw(st.sampled_from(["auto", "auto", "int8", "fp8"])),
        num_padding=draw(st.sampled_from([0, 3])),
    )


@given(case=paged_cases(), small_pieces=st.booleans())
@settings(max_examples=examples(200), deadline=None, derandomize=True)
def test_windows_softcaps_quantized_caches_and_padding_equal_dense_attention(
    case: PagedCase, small_pieces: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if small_pieces:
            patch.setattr(torch_attention, "MAX_GATHERED_BYTES", 1 << 12)
            patch.setattr(torch_attention, "MAX_PIECE_QUERIES", 5)
        out = case.run().double()
    num_tokens = len(out) - case.num_padding
    torch.testing.assert_close(out[:num_tokens], case.expected(), atol=2e-5, rtol=2e-5)
    assert (out[num_tokens:] == 0).all()


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_pieces_of_any_size_give_what_one_piece_gives(
    monkeypatch: pytest.MonkeyPatch, softcap: float
) -> None:
    case = PagedCase(MIXED, spec=msgspec.structs.replace(PLAIN, softcap=softcap), seed=3)
    whole = case.run()
    monkeypatch.setattr(torch_attention, "MAX_GATHERED_BYTES", 1 << 13)
    monkeypatch.setattr(torch_attention, "MAX_SCORES", 300)
    torch.testing.assert_close(case.run(), whole)


def test_a_window_reads_only_the_blocks_it_reaches() -> None:
    window, block_size = 6, 4
    case = PagedCase(
        [(31, 1), (30, 5)], block_size, spec=msgspec.structs.replace(PLAIN, window=window)
    )
    case.run()
    for i, (length, count) in enumerate(case.seqs):
        oldest = length - count - window + 1
        unseen = case.block_table[i, : oldest // block_size].long()
        assert len(unseen)
        case.cache.k_NSKD[unseen] = case.cache.v_NSKD[unseen] = torch.nan  # would spread if read
    metadata = replace(case.metadata(), slot_mapping_T=torch.empty(0, dtype=torch.int64))
    q_THD = torch.cat(case.q)
    out = case.kernels.paged_attention(q_THD, case.cache, metadata, case.spec)
    torch.testing.assert_close(out.double(), case.expected(), atol=2e-5, rtol=2e-5)


def test_the_scores_of_a_softcapped_chunk_are_written_out_in_bounded_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    largest = 0
    attend = torch_attention.softcapped_attention

    def watch(q: torch.Tensor, k: torch.Tensor, *args: object) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, q.shape[:-1].numel() * k.shape[-2])
        return attend(q, k, *args)

    monkeypatch.setattr(torch_attention, "softcapped_attention", watch)
    monkeypatch.setattr(torch_attention, "MAX_SCORES", 2000)
    PagedCase([(200, 150)], spec=msgspec.structs.replace(PLAIN, softcap=2.0)).run()
    assert 1000 < largest <= 2000
