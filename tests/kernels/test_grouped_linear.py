"""Linear layers and embeddings of grouped weights, on every instruction set, by their definition.

The definition is `GroupedWeight.dequantize` and, for activations, `quantized_rows`, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanocore.kernels.cpu.build import INSTRUCTION_SETS
from nanocore.kernels.cpu.cpu_backend import CpuKernels
from nanocore.kernels.cpu.library import find_library
from nanocore.kernels.group_quantization import quantize_eight_bits, quantize_groups
from nanocore.kernels.grouped_weight import GroupedWeight
from nanocore.kernels.linear_weight import LinearWeight, TokenEmbedding
from tests.kernels import cpu_case, grouped_case
from tests.kernels.grouped_case import FORMS

SIZES = [(1, 40, 200), (2, 64, 512), (3, 33, 96), (8, 130, 300), (30, 70, 264)]
"""Rows, outputs and inputs."""
QUANTIZERS = {"int4": quantize_groups, "int8": quantize_eight_bits}


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> str:
    cpu_case.backend(request.param)  # or the test is skipped
    return str(request.param)


def backend(instruction_set: str, *, keeps_activations: bool = False) -> CpuKernels:
    library = cpu_case.runnable_libraries()[instruction_set]
    return CpuKernels(library, keeps_activations=keeps_activations)


def error(actual: Tensor, expected: Tensor, x_TI: Tensor, weight: GroupedWeight) -> float:
    """The largest, as a share of what the products' magnitudes add up to."""
    magnitudes = x_TI.double().abs() @ weight.dequantize().double().abs().T
    return float(((actual - expected).abs() / magnitudes).max())


@pytest.mark.parametrize("keeps_activations", [False, True])
def test_products_are_those_of_the_dequantized_weight(
    instruction_set: str, keeps_activations: bool
) -> None:
    torch.manual_seed(0)
    kernels = backend(instruction_set, keeps_activations=keeps_activations)
    forms = FORMS | {"NF4": lambda o, i: grouped_case.with_codebook(o, i, 64)}
    for name, form in forms.items():
        for index, (num_rows, out_features, in_features) in enumerate(SIZES):
            weight = form(out_features, in_features)
            x_TI = torch.randn(num_rows, in_features)
            x_TI = x_TI.bfloat16() if index % 2 else x_TI
            expected = grouped_case.expected(x_TI, weight, keeps_activations=keeps_activations)
            actual = kernels.logits(x_TI, kernels.pack_linear(weight))
            assert error(actual, expected, x_TI, weight) < 1e-6, (name, x_TI.shape)


def test_an_embedding_is_the_dequantized_weight_to_the_bit(instruction_set: str) -> None:
    torch.manual_seed(0)
    kernels = backend(instruction_set)
    forms = FORMS | {"NF4": lambda o, i: grouped_case.with_codebook(o, i, 64)}
    for name, form in forms.items():
        weight = form(70, 300)
        embedding = TokenEmbedding(kernels.pack_linear(weight), 0, 1.0, torch.float32)
        assert torch.equal(kernels.embedding(torch.arange(70), embedding), weight.dequantize()), (
            name
        )


def test_four_bits_are_chosen_by_the_least_squared_error(instruction_set: str) -> None:
    torch.manual_seed(0)
    kernels = backend(instruction_set)
    weight_OI = torch.randn(70, 320) * torch.rand(70, 1)
    chosen_OI = unpacked(kernels, kernels.pack_linear(weight_OI, "int4"))
    x_OGK = weight_OI.unflatten(1, (-1, 32))
    low_OG1, high_OG1 = x_OGK.amin(-1, keepdim=True), x_OGK.amax(-1, keepdim=True)
    grid_OG1 = (high_OG1 - low_OG1) / 15
    plain_OI = (((x_OGK - low_OG1) / grid_OG1).round() * grid_OG1 + low_OG1).flatten(1)
    squares = [float((x_OI - weight_OI).square().sum()) for x_OI in (chosen_OI, plain_OI)]
    assert squares[0] < 0.9 * squares[1]  # of numbers from the smallest to the largest


@pytest.mark.parametrize(("quantization", "most"), [("int4", 15), ("int8", 127)])
def test_weights_on_a_grid_stay_as_they_are(
    instruction_set: str, quantization: str, most: int
) -> None:
    kernels = backend(instruction_set)
    numbers_OI = torch.randint(0, most + 1, (64, 320)).float()
    numbers_OI[:, ::32], numbers_OI[:, 1::32] = 0.0, float(most)
    weight_OI = numbers_OI * 0.125
    weight_OI[3] = 0.0
    kept_OI = unpacked(kernels, kernels.pack_linear(weight_OI, quantization))
    assert float((kept_OI - weight_OI).abs().max()) < 1e-3 * most * 0.125
    assert not kept_OI[3].any()


def test_quantized_weights_are_the_reference_s_to_the_bit(instruction_set: str) -> None:
    kernels = backend(instruction_set)
    for out_features, in_features in ((70, 576), (33, 300), (32, 7)):
        weight_OI = draw(out_features, in_features) * draw(out_features, 1)
        weight_OI[1], weight_OI[2] = 0.0, -0.25
        weight_OI[3], weight_OI[4] = weight_OI[3].abs(), weight_OI[4] * 1e5
        for quantization, quantize in QUANTIZERS.items():
            packed = kernels.pack_linear(weight_OI, quantization)
            assert torch.equal(unpacked(kernels, packed), quantize(weight_OI).dequantize())


@pytest.mark.parametrize("quantization", ["int4", "int8"])
@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_seen_in_their_results(
    instruction_set: str, quantization: str, strange: float
) -> None:
    kernels = backend(instruction_set)
    weight_OI = torch.ones(40, 96)
    weight_OI[7, 50] = strange
    logits_RO = kernels.logits(torch.ones(2, 96), kernels.pack_linear(weight_OI, quantization))
    assert logits_RO.isnan().nonzero()[:, 1].tolist() == [7, 7]


def test_activations_that_are_not_finite_are_seen_in_their_rows(instruction_set: str) -> None:
    kernels = backend(instruction_set)
    for form in ("4 bits, 32", "8 bits, one scale an output", "Q4_K"):
        x_TI = torch.ones(3, 256)
        x_TI[1, 100] = torch.inf
        logits_TO = kernels.logits(x_TI, kernels.pack_linear(FORMS[form](40, 256)))
        assert logits_TO.isnan().any(1).tolist() == [False, True, False], form


def test_rows_have_the_same_bits_in_every_batch(instruction_set: str) -> None:
    torch.manual_seed(0)
    for keeps_activations in (False, True):
        kernels = backend(instruction_set, keeps_activations=keeps_activations)
        for form in FORMS.values():
            packed = kernels.pack_linear(form(96, 288))
            x_TI = torch.randn(25, 288)
            together_TO = kernels.linear(x_TI, packed)
            for start, stop in ((0, 1), (1, 3), (3, 7), (7, 15), (13, 25)):
                some_TO = kernels.linear(x_TI[start:stop], packed)
                assert torch.equal(some_TO, together_TO[start:stop])


def test_gated_layers_gate_the_first_half_of_a_grouped_weight(instruction_set: str) -> None:
    torch.manual_seed(0)
    kernels = backend(instruction_set)
    weight = FORMS["4 bits, zeros, 128"](128, 256)
    packed, x_TI = kernels.pack_linear(weight), torch.randn(5, 256)
    gate_TO, up_TO = kernels.linear(x_TI, packed).chunk(2, dim=1)
    expected_TO = torch.nn.functional.silu(gate_TO) * up_TO
    torch.testing.assert_close(kernels.gated_linear(x_TI, packed), expected_TO)


def unpacked(kernels: CpuKernels, packed: LinearWeight) -> Tensor:
    embedding = TokenEmbedding(packed, 0, 1.0, torch.float32)
    return kernels.embedding(torch.arange(packed.out_features), embedding)


@pytest.fixture
def fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A digest of an instruction set's results: fingerprint(name, vnni, keeps_activations=...)."""

    def make(instruction_set: str, vnni: str, *, keeps_activations: bool = False) -> str:
        path = cpu_case.runnable_libraries()[instruction_set].path
        with monkeypatch.context() as patch:
            patch.setenv("NANOCORE_CPU_VNNI", vnni)
            library = cpu_case.loaded_anew(path, tmp_path)
            return grouped_case.digest(CpuKernels(library, keeps_activations=keeps_activations))

    return make


def with_fma() -> list[str]:
    """The instruction sets of this machine that round a product and a sum once."""
    return [name for name in cpu_case.runnable_libraries() if name != "plain"]


def test_results_have_the_same_bits_on_all_instruction_sets_with_fma(
    fingerprint: Callable[..., str],
) -> None:
    found = {(name, vnni): fingerprint(name, vnni) for name in with_fma() for vnni in ("0", "1")}
    if len(found) < 2:
        pytest.skip("one instruction set alone")
    assert len(set(found.values())) == 1, found


def test_without_fma_or_with_float_activations_bits_differ(
    fingerprint: Callable[..., str],
) -> None:
    runnable = cpu_case.runnable_libraries()
    if not {"avx2", "plain", "avx512_bf16"} <= runnable.keys():
        pytest.skip("not all instruction sets are here")
    assert fingerprint("plain", "1") != fingerprint("avx2", "1")
    kept = [fingerprint(name, "1", keeps_activations=True) for name in ("avx2", "avx512_bf16")]
    assert kept[0] != kept[1]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def error_of(weight: Tensor, quantized: Tensor) -> float:
    return float((weight - quantized).norm() / weight.norm())


def test_four_bits_err_as_little_as_their_levels_allow() -> None:
    weight = draw(64, 256)
    assert 0.05 < error_of(weight, quantize_groups(weight).dequantize()) < 0.075
    assert 0.004 < error_of(weight, quantize_eight_bits(weight).dequantize()) < 0.006


def test_groups_with_an_offset_err_no_more_than_those_around_zero() -> None:
    weight = draw(64, 256) - 3.0
    error = float((quantize_groups(weight).dequantize() - weight).norm() / draw(64, 256).norm())
    assert error < 0.08


@pytest.mark.parametrize("quantization", QUANTIZERS)
def test_tails_zeros_and_what_is_not_finite(quantization: str) -> None:
    weight = draw(5, 300)
    weight[1] = 0
    weight[2, 40] = torch.inf
    weight[3, 299] = torch.nan
    groups = QUANTIZERS[quantization](weight)
    assert (groups.values_OI.shape, groups.scale_OG.shape) == ((5, 300), (5, 10))
    out = groups.dequantize()
    assert not out[1].any()
    assert out.isnan().nonzero()[:, 0].unique().tolist() == [2, 3]
    # Scales of four bits are times one of 256 inputs.
    seen = range(256) if quantization == "int4" else range(32, 64)
    assert out[2].isnan().nonzero().flatten().tolist() == list(seen)
    assert error_of(weight[0], out[0]) < 0.12


def test_the_native_kernels_multiply_with_the_same_numbers() -> None:
    library = find_library()
    if library is None:
        pytest.skip("nanocore was installed without a C++ compiler")
    kernels = CpuKernels(library, keeps_activations=True)
    weight = draw(1024, 320) * draw(1024, 1)
    native = kernels.linear(torch.eye(320), kernels.pack_linear(weight, "int4")).t()
    torch.testing.assert_close(native, quantize_groups(weight).dequantize(), rtol=1e-6, atol=1e-6)
