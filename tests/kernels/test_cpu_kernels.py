"""Every native kernel against the torch backend, in every instruction set that is here.

Products are compared with what their own terms allow: a float32 sum of K terms may differ from
another by a small multiple of 2^-24 of the sum of magnitudes, and bfloat16 results by rounding
to eight bits, 2^-8, once or as often as the interface rounds.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanocore.kernels import Activation
from nanocore.kernels.attention import KVCache, QKNorm, Rotary
from nanocore.kernels.cpu.cpu_backend import CpuKernels
from nanocore.kernels.interface import Kernels
from nanocore.kernels.linear_weight import TokenEmbedding
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.worker.rank_messages import Quantization
from tests.campaign import examples
from tests.kernels import cpu_case
from tests.kernels.cpu_case import EMULATED_AMX, PagedCase
from tests.kernels.grouped_case import quantized_rows
from tests.kernels.layered_cache import layered

TORCH = TorchKernels()
ROUNDED_ONCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7.99}
"""Relative, of one rounding to the nearest and of float32's own errors."""

FEW = settings(max_examples=examples(60), deadline=None, derandomize=True)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
activations: st.SearchStrategy[Activation] = st.sampled_from(["silu", "gelu"])
quantizations: st.SearchStrategy[Quantization | None] = st.sampled_from([None, "int8"])
seeds = st.integers(0, 2**30)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided(x: Tensor, gap: int) -> Tensor:
    apart = torch.full((len(x), x.shape[1] + gap), torch.nan, dtype=x.dtype)
    apart[:, : x.shape[1]] = x
    return apart[:, : x.shape[1]]


def assert_close(actual: Tensor, expected: Tensor, rtol: float, atol: Tensor | float) -> None:
    """|actual - expected| <= rtol |expected| + atol, of each element."""
    assert actual.shape == expected.shape
    actual, expected = actual.double(), expected.double()
    allowed = rtol * expected.abs() + atol
    excess = (actual - expected).abs() - allowed
    assert bool((excess <= 0).all()), f"by {excess.max().item()} more than allowed"


def eight_bits(x: Tensor, quantization: Quantization | None) -> Tensor:
    return quantized_rows(x, 32).float() if quantization == "int8" else x.float()


@FEW
@given(
    rows=st.integers(0, 40),
    in_features=st.integers(1, 300),
    out_features=st.integers(1, 200),
    has_bias=st.booleans(),
    gap=st.integers(0, 3),
    quantization=quantizations,
    dtype=dtypes,
    seed=seeds,
)
def test_linear(
    kernels: CpuKernels,
    rows: int,
    in_features: int,
    out_features: int,
    has_bias: bool,
    gap: int,
    quantization: Quantization | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    x = strided(draw(seed, rows, in_features, dtype=dtype), gap)
    weight = draw(seed + 1, out_features, in_features, dtype=dtype)
    bias = draw(seed + 2, out_features, dtype=dtype) if has_bias else None
    packed = kernels.pack_linear(weight.clone(), quantization)
    reference = TORCH.pack_linear(weight.float(), quantization)
    actual = kernels.linear(x, packed, bias)
    operand = eight_bits(x, quantization)
    expected = TORCH.linear(operand, reference, None if bias is None else bias.float())
    assert actual.dtype == dtype
    magnitudes = x.float().abs() @ weight.float().abs().T + (0 if bias is None else bias.abs())
    assert_close(actual, expected, ROUNDED_ONCE[dtype], 1e-6 * magnitudes)


@FEW
@given(
    rows=st.integers(1, 20),
    in_features=st.integers(1, 100),
    vocab=st.integers(1, 100),
    softcap=st.sampled_from([0.0, 0.5, 30.0]),
    quantization=quantizations,
    dtype=dtypes,
    seed=seeds,
)
def test_logits_are_float32(
    kernels: CpuKernels,
    rows: int,
    in_features: int,
    vocab: int,
    softcap: float,
    quantization: Quantization | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    x, weight = draw(seed, rows, in_features, dtype=dtype), draw(seed, vocab, in_features)
    weight = weight.to(dtype)
    actual = kernels.logits(x, kernels.pack_linear(weight.clone(), quantization), softcap)
    reference = TORCH.pack_linear(weight.float(), quantization)
    expected = TORCH.logits(eight_bits(x, quantization), reference, softcap)
    assert actual.dtype == torch.float32
    assert_close(actual, expected, 1e-6, 1e-6 * (x.float().abs() @ weight.float().abs().T))


@pytest.mark.parametrize("rows", [64, 400])
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_of_many_rows_and_a_layer_of_one_row_have_the_same_bits(
    kernels: CpuKernels, rows: int, quantization: Quantization | None, dtype: torch.dtype
) -> None:
    # Packed rows of more than one block of `linear.h`.
    x, weight = draw(0, rows, 1501, dtype=dtype), draw(1, 67, 1501, dtype=dtype)
    packed = kernels.pack_linear(weight.clone(), quantization)
    together = kernels.linear(x, packed)
    for row in range(0, rows, rows // 50):
        assert torch.equal(kernels.linear(x[row : row + 1], packed)[0], together[row])
    for start in range(0, rows, 7):
        assert torch.equal(
            kernels.linear(x[start : start + 7], packed), together[start : start + 7]
        )


@FEW
@given(
    num_tokens=st.integers(0, 30),
    width=st.integers(1, 130),
    vocab=st.integers(1, 70),
    first_token=st.integers(0, 30),
    factor=st.sampled_from([1.0, 11.3125]),
    quantization=quantizations,
    dtype=dtypes,
    seed=seeds,
)
def test_embedding_is_exact(
    kernels: CpuKernels,
    num_tokens: int,
    width: int,
    vocab: int,
    first_token: int,
    factor: float,
    quantization: Quantization | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(0, vocab + 40, (num_tokens,), generator=generator)
    weight = draw(seed, vocab, width, dtype=dtype)
    packed = kernels.pack_linear(weight.clone(), quantization)
    reference = TORCH.pack_linear(weight, quantization)
    actual = kernels.embedding(token_ids, TokenEmbedding(packed, first_token, factor, dtype))
    expected = TORCH.embedding(token_ids, TokenEmbedding(reference, first_token, factor, dtype))
    assert actual.dtype == dtype
    assert torch.equal(actual, expected)


@FEW
@given(
    rows=st.integers(0, 20),
    size=st.integers(1, 200),
    dtype=dtypes,
    has_float_weight=st.booleans(),
    is_added=st.booleans(),
    gap=st.integers(0, 3),
    scale=st.sampled_from([1e-3, 1.0, 300.0]),
    seed=seeds,
)
def test_norms(
    kernels: CpuKernels,
    rows: int,
    size: int,
    dtype: torch.dtype,
    has_float_weight: bool,
    is_added: bool,
    gap: int,
    scale: float,
    seed: int,
) -> None:
    x = strided((scale * draw(seed, rows, size)).to(dtype), gap)
    residual = strided((scale * draw(seed + 1, rows, size)).to(dtype), gap)
    weight = draw(seed + 2, size, dtype=torch.float32 if has_float_weight else dtype)
    total = x
    if is_added:
        total = x + residual
        actual, actual_total = kernels.add_rms_norm(x, residual, weight, 1e-6)
        assert torch.equal(actual_total, total)
    else:
        actual = kernels.rms_norm(x, weight, 1e-6)
    assert actual.dtype == dtype
    expected = TORCH.rms_norm(total.float(), weight.float(), 1e-6)
    # A weight of x's dtype is multiplied by what was rounded already.
    num_roundings = 1 if has_float_weight else 2
    assert_close(actual, expected, num_roundings * ROUNDED_ONCE[dtype], 1e-37)


@pytest.mark.parametrize("has_float_weight", [False, True])
def test_the_norms_weight_decides_where_bfloat16_is_rounded(
    kernels: CpuKernels, has_float_weight: bool
) -> None:
    x, weight = draw(0, 50, 128, dtype=torch.bfloat16), draw(1, 128, dtype=torch.bfloat16)
    weights = weight.float() if has_float_weight else weight
    other = weight if has_float_weight else weight.float()
    actual = kernels.rms_norm(x, weights, 1e-6)
    # All but those few that float32's own error carries over the edge.
    differs = (actual != TORCH.rms_norm(x, weights, 1e-6)).float().mean()
    differs_from_other = (actual != TORCH.rms_norm(x, other, 1e-6)).float().mean()
    assert differs < 1e-3
    assert differs_from_other > 0.1


def test_the_norm_of_heads_is_of_the_last_dimension(kernels: CpuKernels) -> None:
    x, weight = draw(0, 5, 3, 24), draw(1, 24)
    assert_close(kernels.rms_norm(x, weight, 1e-6), TORCH.rms_norm(x, weight, 1e-6), 2e-6, 0)


@FEW
@given(
    rows=st.integers(0, 20),
    size=st.integers(1, 130) | st.sampled_from([32, 64, 96]),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    activation=activations,
    gap=st.integers(0, 3),
    dtype=dtypes,
    seed=seeds,
)
def test_gates(
    kernels: CpuKernels,
    rows: int,
    size: int,
    scale: float,
    activation: Activation,
    gap: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    x = strided((scale * draw(seed, rows, 2 * size)).to(dtype), gap)
    itself = torch.eye(2 * size)
    packed = kernels.pack_linear(itself.to(dtype))
    actual = kernels.gated_linear(x, packed, None, activation)
    reference = TORCH.pack_linear(itself.double())
    expected = TORCH.gated_linear(x.double(), reference, None, activation)
    # 1 + tanh cancels where gelu is nearly 0: an error of its own, of the gate's magnitude.
    gate, up = x.double().chunk(2, dim=-1)
    cancelled = 2e-7 * (gate * up).abs() if activation == "gelu" else 0
    # Beyond exp(88) there is not even float32.
    underflow = 1e-36 * (1 + up.abs())
    assert_close(actual, expected, 2 * ROUNDED_ONCE[dtype] + 2e-6, cancelled + underflow)


@FEW
@given(
    rows=st.integers(1, 60),
    in_features=st.integers(1, 200),
    num_tiles=st.integers(1, 4),
    has_bias=st.booleans(),
    activation=activations,
    quantization=quantizations,
    dtype=dtypes,
    seed=seeds,
)
def test_a_gate_within_a_linear_layer_has_the_bits_of_one_behind_it(
    kernels: CpuKernels,
    rows: int,
    in_features: int,
    num_tiles: int,
    has_bias: bool,
    activation: Activation,
    quantization: Quantization | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    size = 32 * num_tiles
    x = draw(seed, rows, in_features, dtype=dtype)
    weight, bias = draw(seed + 1, 2, size, in_features), draw(seed + 2, 2, size)
    # With one more feature in each half these are no whole tiles: the gate is a kernel of its own.
    padded_weight, padded_bias = F.pad(weight, (0, 0, 0, 1)), F.pad(bias, (0, 1))
    results = []
    for weights, biases in ((weight, bias), (padded_weight, padded_bias)):
        packed = kernels.pack_linear(weights.flatten(0, 1).to(dtype), quantization)
        added = biases.flatten().to(dtype) if has_bias else None
        results.append(kernels.gated_linear(x, packed, added, activation)[:, :size])
    assert results[0].abs().sum() > 0
    assert torch.equal(*results)


@FEW
@given(
    rows=st.integers(1, 60), size=st.integers(1, 200), activation=activations, dtype=dtypes,
    seed=seeds,
)  # fmt: skip
def test_an_activation_without_a_gate_is_a_row_s_alone(
    kernels: CpuKernels, rows: int, size: int, activation: Activation, dtype: torch.dtype, seed: int
) -> None:
    x = draw(seed, rows, size, dtype=dtype)
    out = kernels.activate(x, activation)
    torch.testing.assert_close(out, TorchKernels().activate(x, activation))
    alone = torch.cat([kernels.activate(row, activation) for row in x.split(1)])
    assert torch.equal(out, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_of_extreme_values(kernels: CpuKernels, dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, 1e4, -1e4, 88.0, -88.0, 100.0, -100.0, torch.inf, torch.nan])
    for size in (9, 32):
        gates = torch.cat((values, torch.zeros(size - 9)))
        bias = torch.cat((gates, torch.ones(size))).to(dtype)
        packed = kernels.pack_linear(torch.zeros(2 * size, 3, dtype=dtype))
        for activation in ("silu", "gelu"):
            out = kernels.gated_linear(torch.zeros(1, 3, dtype=dtype), packed, bias, activation)
            out = out[0].float()
            assert out[8].isnan()
            assert out[7] == torch.inf
            positive, negative = out[[1, 3, 5]], out[[2, 4, 6]]
            assert torch.equal(positive, bias[[1, 3, 5]].float())
            assert (negative.abs() < 1e-30).all()
            assert out[0] == 0


@st.composite
def paged_cases(draw_: st.DrawFn) -> PagedCase:
    num_kv_heads, group = draw_(st.integers(1, 3)), draw_(st.integers(1, 16))
    head_dim = draw_(st.sampled_from([16, 32, 48, 64, 80, 128]))
    block_size = draw_(st.sampled_from([16, 32, 64, 128]))
    num_steps = draw_(st.integers(1, 3))
    counts = st.sampled_from([0, 1, 1, 1, 2, 3, 7, 17, 63, 64, 65, 100])
    seqs = st.lists(counts, min_size=num_steps, max_size=num_steps).filter(any)
    return PagedCase(
        counts=draw_(st.lists(seqs, min_size=1, max_size=5)),
        block_size=block_size,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=draw_(st.sampled_from([0, 2, 16, head_dim])),
        has_qk_norm=draw_(st.booleans()),
        window=draw_(st.sampled_from([0, 0, 1, 2, 15, 16, 63, 64, 65, 100])),
        softcap=draw_(st.sampled_from([0.0, 0.0, 5.0])),
        num_padding=draw_(st.integers(0, 3)),
        dtype=draw_(dtypes),
        is_quantized=draw_(st.booleans()),
        seed=draw_(seeds),
    )


def assert_paged_close(kernels: CpuKernels, case: PagedCase) -> None:
    """Q and attention of all steps, against the reference in float32 on the same inputs.

    A quantized cache holds the same numbers in both if K is what was drawn.
    """
    rtol = ROUNDED_ONCE[case.dtype]
    # Rounding K and Q changes the scores: this much of the values, at the sizes that are drawn.
    moved = 5e-6 if case.dtype == torch.float32 else 2**-5
    if case.rotary_dim == 0 and not case.has_qk_norm:
        moved = 2e-6 if case.dtype == torch.float32 else 2**-8  # weights alone, in pairs
    values = torch.cat([qkv.flatten() for qkv in case.inputs()[0]]).abs().max().item()
    results = case.run(kernels)
    expected = case.run(TORCH, torch.float32, keeps_empty=False)
    for (q, out), (expected_q, expected_out) in zip(results, expected, strict=True):
        assert q.dtype == out.dtype == case.dtype
        largest = max([1.0, *expected_q.flatten().abs().tolist()])
        assert_close(q, expected_q, 2 * rtol, 3 * rtol * largest)
        assert_close(out, expected_out, rtol, moved * values)


@settings(FEW, max_examples=examples(40))
@given(case=paged_cases())
def test_rotation_and_paged_attention(kernels: CpuKernels, case: PagedCase) -> None:
    if case.is_quantized:
        case = replace(case, rotary_dim=0, has_qk_norm=False)
    assert_paged_close(kernels, case)
    clean = case.run(kernels)
    for garbage in (torch.nan, torch.inf):  # of an earlier request
        for (q, out), (clean_q, clean_out) in zip(
            case.run(kernels, garbage=garbage), clean, strict=True
        ):
            assert torch.equal(q, clean_q)
            assert torch.equal(out, clean_out)


class GrowingScores(PagedCase):
    """Logits of later tiles of 128 keys are larger: by 4, then by 18, then by 100."""

    def inputs(self) -> tuple[list[Tensor], QKNorm | None, Rotary, Tensor]:
        qkv, *rest = super().inputs()
        for x in qkv:
            q, k, _ = x.view(len(x), -1, self.head_dim).split((self.num_heads, 2, 2), dim=1)
            q[..., 0] = 8.0
            k[..., 0] = torch.tensor([0.0, 3.0, 16.0, 90.0])[torch.arange(len(x)) // 128, None]
        return qkv, *rest


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_follow_scores_that_grow(
    kernels: CpuKernels, dtype: torch.dtype, is_quantized: bool
) -> None:
    cuts = [(500,), (140, 250, 110)]
    cases = [GrowingScores([cut], dtype=dtype, is_quantized=is_quantized) for cut in cuts]
    for case in cases:
        assert_paged_close(kernels, case)
    whole, parts = (torch.cat([out for _, out in case.run(kernels)]) for case in cases)
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "is_quantized"), [(0, False), (70, False), (70, True)])
def test_how_a_sequence_is_cut_into_steps_does_not_change_a_bit(
    kernels: CpuKernels, dtype: torch.dtype, window: int, is_quantized: bool
) -> None:
    def outputs(*counts: int) -> Tensor:
        case = PagedCase(
            [counts], 16, 6, 2, 32, rotary_dim=16, has_qk_norm=True, window=window, dtype=dtype,
            is_quantized=is_quantized,
        )  # fmt: skip
        return torch.cat([out for _, out in case.run(kernels, garbage=torch.nan)])

    whole = outputs(200)
    assert torch.equal(outputs(1, 63, 64, 72), whole)
    assert torch.equal(outputs(*[40] * 5), whole)
    assert torch.equal(outputs(*[13] * 15, 5), whole)
    assert torch.equal(outputs(*[1] * 200), whole)


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_how_a_block_table_is_scattered_and_cut_does_not_change_a_bit(
    kernels: CpuKernels, dtype: torch.dtype, is_quantized: bool
) -> None:
    def outputs(block_size: int) -> list[Tensor]:
        case = PagedCase(
            [(100, 1), (1, 130), (7, 0)], block_size, 8, 2, 48, rotary_dim=48, dtype=dtype,
            is_quantized=is_quantized,
        )  # fmt: skip
        return [out for _, out in case.run(kernels)]

    expected = outputs(16)
    for block_size in (32, 64, 128):
        for actual, out in zip(outputs(block_size), expected, strict=True):
            assert torch.equal(actual, out)


def test_padding_tokens_get_zeros_and_are_stored_nowhere(kernels: CpuKernels) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        padded = PagedCase([(20, 1), (1, 5)], num_padding=4, dtype=dtype)
        bare = PagedCase([(20, 1), (1, 5)], num_padding=0, dtype=dtype)
        for (_, out), (_, expected) in zip(padded.run(kernels), bare.run(kernels), strict=True):
            assert torch.equal(out[:-4], expected)
            assert not out[-4:].any()


def test_attention_takes_queries_of_any_stride(kernels: CpuKernels) -> None:
    class Contiguous(CpuKernels):
        def paged_attention(self, q_THD: Tensor, *operands: Any) -> Tensor:
            assert not q_THD.is_contiguous()
            return super().paged_attention(q_THD.contiguous(), *operands)

    case = PagedCase([(20, 1), (1, 5)], rotary_dim=32)
    contiguous = Contiguous(kernels.library)
    for (_, out), (_, expected) in zip(case.run(contiguous), case.run(kernels), strict=True):
        assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("block_size", "head_dim"), [(4, 32), (8, 32), (24, 32), (16, 24), (16, 8)]
)
def test_shapes_that_are_no_whole_vectors_are_left_to_torch(
    kernels: CpuKernels, block_size: int, head_dim: int
) -> None:
    case = PagedCase([(30, 1, 1), (1, 1, 9)], block_size, head_dim=head_dim, rotary_dim=8)
    for (q, out), (torch_q, torch_out) in zip(case.run(kernels), case.run(TORCH), strict=True):
        assert torch.equal(q, torch_q)
        assert torch.equal(out, torch_out)


def store_alone(
    kernels: Kernels, case: PagedCase, damaged: float | None = None
) -> tuple[KVCache, Tensor]:
    """The cache after the only step of a case, and attention's result. damaged: of token 5's K."""
    (qkv,), norm, rotary, table = case.inputs()
    if damaged is not None:
        qkv[5, case.num_heads * case.head_dim + 3] = damaged
    cache = case.make_cache(case.dtype)
    _, metadata = case.metadata(0, table, keeps_empty=True)
    q = kernels.rope_and_store_kv(qkv, case.num_heads, norm, rotary, cache, metadata)
    return cache, kernels.paged_attention(q, cache, metadata, case.spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_keys_values_and_scales_are_the_reference_s_in_an_order_of_their_own(
    kernels: CpuKernels, dtype: torch.dtype
) -> None:
    case = PagedCase([(64,)], 32, 8, 2, 48, dtype=dtype, is_quantized=True)
    (native, _), (reference, _) = (store_alone(each, case) for each in (kernels, TORCH))

    def in_order(x_NSKD: Tensor, *order: int) -> Tensor:
        stored = x_NSKD.reshape(len(x_NSKD), *(x_NSKD.shape[i] for i in order))
        return stored.permute(0, *(1 + order.index(i) for i in range(1, x_NSKD.dim())))

    assert native.k_scale_NSK is not None and native.v_scale_NSK is not None  # noqa: PT018
    for actual, expected in (
        (in_order(native.k_NSKD, 2, 3, 1), reference.k_NSKD),
        (in_order(native.v_NSKD, 2, 1, 3), reference.v_NSKD),
        (in_order(native.k_scale_NSK, 2, 1), reference.k_scale_NSK),
        (in_order(native.v_scale_NSK, 2, 1), reference.v_scale_NSK),
    ):
        assert expected is not None
        assert torch.equal(actual, expected)
    assert native.k_NSKD.any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_keys_that_are_not_finite_are_seen_by_those_that_see_them(
    kernels: CpuKernels, dtype: torch.dtype, value: float
) -> None:
    case = PagedCase([(40,)], num_heads=4, num_kv_heads=2, dtype=dtype, is_quantized=True)
    _, out = store_alone(kernels, case, damaged=value)
    _, healthy = store_alone(kernels, case)
    assert out[5:, :2].isnan().all()
    assert torch.equal(out[:5], healthy[:5])
    assert torch.equal(out[5:, 2:], healthy[5:, 2:])


def test_a_cache_of_fp8_is_left_to_torch(kernels: CpuKernels) -> None:
    (qkv,), norm, rotary, table = (case := PagedCase([(30,)], rotary_dim=8)).inputs()
    _, metadata = case.metadata(0, table, keeps_empty=True)
    shape = case.num_blocks, case.block_size, case.num_kv_heads, case.head_dim
    results = []
    for backend in (kernels, TORCH):
        values = [torch.zeros(shape).to(torch.float8_e4m3fn) for _ in range(2)]
        cache = layered(*values, *(torch.ones(shape[:3]).bfloat16() for _ in range(2)))
        q = backend.rope_and_store_kv(qkv.clone(), 4, norm, rotary, cache, metadata)
        results.append(backend.paged_attention(q, cache, metadata, case.spec))
    assert torch.equal(*results)
    assert results[0].any()


AVX512_BF16 = "avx512_bf16"


def digest(kernels: CpuKernels) -> str:
    """A digest of products of bfloat16."""
    torch.manual_seed(0)
    digest = xxhash.xxh3_128()
    for in_features in (33, 512):
        packed = kernels.pack_linear(torch.randn(70, in_features).bfloat16())
        for num_rows in (1, 13, 40):
            x_TI = torch.randn(num_rows, in_features).bfloat16()
            digest.update(kernels.logits(x_TI, packed).numpy().tobytes())
    case = PagedCase([[150, 1], [40, 3], [9, 1]], head_dim=64, dtype=torch.bfloat16)
    for _, out_THD in case.run(kernels):
        digest.update(out_THD.float().numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture(scope="module")
def with_amx() -> str:
    found = cpu_case.runnable_libraries().get(AVX512_BF16)
    if found is None or not found.call("uses_amx"):
        pytest.skip("this machine has no AMX")
    return found.path


@pytest.mark.parametrize("kernels", [EMULATED_AMX], indirect=True)
def test_software_that_stands_for_the_matrix_unit_has_its_bits(
    kernels: CpuKernels, with_amx: str
) -> None:
    assert digest(kernels) == digest(cpu_case.backend(AVX512_BF16))


def test_without_the_matrix_unit_results_have_other_bits_and_another_name(
    with_amx: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOCORE_CPU_AMX", "0")
    without = CpuKernels(cpu_case.loaded_anew(with_amx, tmp_path))
    assert digest(without) != digest(cpu_case.backend(AVX512_BF16))
    assert "AMX" not in without.variant
    assert "avx512_bf16 and AMX" in cpu_case.backend(AVX512_BF16).variant
