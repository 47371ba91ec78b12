"""Linear layers in E4M3 against numbers rounded one by one, and what torch's product is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from nanocore.kernels.linear_weight import FP8, LinearWeight, quantize_rows
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.kernels.triton.fp8_linear import fp8_linear, quantize_tokens
from nanocore.kernels.triton.triton_backend import TritonKernels
from tests.kernels.fp8_numbers import E4M3, rounded

# What is infinite on a GPU without a word, numpy warns of.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

REFERENCE = TorchKernels()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pack(out_features: int, in_features: int) -> LinearWeight:
    return REFERENCE.pack_linear(draw(out_features, in_features, seed=1), "fp8")


@contextmanager
def checked_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Hold what torch's product is given to what it takes on CUDA, where a CPU takes more."""
    given: list[dict[str, Any]] = []
    product = torch._scaled_mm

    def checked(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        assert (a.dtype, b.dtype) == (FP8, FP8)
        assert a.stride() == (a.shape[1], 1), "row by row"
        assert b.stride() == (1, b.shape[0]), "column by column"
        assert not b.shape[0] % 16
        assert not b.shape[1] % 16
        scale_a, scale_b = options["scale_a"], options["scale_b"]
        assert (scale_a.dtype, scale_b.dtype) == (torch.float32, torch.float32)
        assert (scale_a.shape, scale_b.shape) == ((len(a), 1), (1, b.shape[1]))
        assert scale_a.is_contiguous()
        assert scale_b.t().is_contiguous()
        if (bias := options["bias"]) is not None:
            assert bias.dtype == options["out_dtype"] != torch.float32
            assert bias.shape == (b.shape[1],)
        given.append(options)
        return product(a, b, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_scaled_mm", checked)
        yield given


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [1, 16, 70, 8192, 8200, 20000])
def test_tokens_are_quantized_as_the_reference_has_it(size: int, dtype: torch.dtype) -> None:
    x = (draw(4, size) * torch.tensor([[1e-3], [1.0], [30.0], [1.0]])).to(dtype)
    x[3] = 0
    values, scales = quantize_tokens(x)
    expected_values, expected_scales = quantize_rows(x)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(values.float(), expected_values.float())
    assert values.float().abs().amax(dim=1).tolist() == [448.0, 448.0, 448.0, 0.0]
    torch.testing.assert_close(
        values[:3].double() * scales[:3, None].double(), rounded(x[:3]), rtol=1e-6, atol=0
    )


def test_every_number_of_e4m3_is_kept_and_what_lies_between_goes_to_the_nearest() -> None:
    both = torch.cat((E4M3, -E4M3)).float()
    between = (E4M3[1:] + E4M3[:-1]).float() / 2
    x = torch.stack((both, torch.cat((between, -between, both[126:127], both[:1]))))
    x[1, -2] = 448.0  # the largest, so that the scale is one
    values, scales = quantize_tokens(x)
    assert scales.tolist() == [1.0, 1.0]
    assert torch.equal(values[0].float(), both)
    assert torch.equal(values[1].float(), x[1].to(FP8).float()), "ties go to even"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("size", [48, 8208])
def test_what_is_not_finite_does_not_become_a_number(value: float, size: int) -> None:
    x = draw(3, size)
    expected = fp8_linear(x, pack(16, size))
    x[1, size - 5] = value
    for out in (fp8_linear(x, pack(16, size)), REFERENCE.linear(x, pack(16, size))):
        assert out[1].isnan().all()
        assert torch.equal(out[::2].isfinite(), torch.ones(2, 16, dtype=torch.bool))
    assert torch.equal(fp8_linear(x, pack(16, size))[::2], expected[::2])
    weight = draw(16, size)
    weight[2, 7] = value
    for kernels in (REFERENCE, TritonKernels(torch.device("cpu"))):
        out = kernels.linear(x[:1], kernels.pack_linear(weight.clone(), "fp8"))[0]
        assert out.isnan().nonzero().flatten().tolist() == [2]


@pytest.mark.parametrize("kind", ["tiny", "subnormal", "huge"])
def test_extreme_tokens_keep_their_values(kind: str) -> None:
    factor = {"tiny": 1e-30, "subnormal": 1e-40, "huge": 1e36}[kind]
    x = draw(2, 64) * factor
    values, scales = quantize_tokens(x)
    assert scales.isfinite().all()
    assert (scales > 0).all()
    back = values.double() * scales[:, None].double()
    unit = 2.0**-9 if kind == "subnormal" else 16.0  # of the largest values
    assert ((back - x.double()).abs() <= unit * scales[:, None].double() + 1e-45).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("outs", "ins"), [(16, 16), (48, 160), (160, 64)])
@pytest.mark.parametrize("rows", [1, 2, 17])
def test_a_layer_is_the_product_of_what_was_rounded(
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    outs: int,
    ins: int,
    has_bias: bool,
    dtype: torch.dtype,
) -> None:
    x, weight = draw(rows, ins).to(dtype), draw(outs, ins, seed=1).to(dtype)
    bias = draw(outs, seed=2).to(dtype) if has_bias else None
    expected = rounded(x) @ rounded(weight).t() + (0 if bias is None else bias.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    packed = REFERENCE.pack_linear(weight, "fp8")
    with checked_products(monkeypatch) as given:
        ours = fp8_linear(x, packed, bias)
    assert [options["out_dtype"] for options in given] == [dtype]
    for out in (ours, REFERENCE.linear(x, packed, bias)):
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("rows", [1, 65])
def test_a_gated_layer_is_that_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, activation: Any, rows: int
) -> None:
    x, bias, kernels = draw(rows, 32), draw(96, seed=2), TritonKernels(torch.device("cpu"))
    weight = kernels.pack_linear(draw(96, 32, seed=1), "fp8")
    with checked_products(monkeypatch) as given:
        out = kernels.gated_linear(x, weight, bias, activation)
    assert len(given) == 1
    expected = REFERENCE.gated_linear(x, weight, bias, activation)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_rows_may_lie_apart_and_there_may_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = draw(9, 100)[::2, 5:53], pack(32, 48)
    with checked_products(monkeypatch):
        torch.testing.assert_close(fp8_linear(x, weight), fp8_linear(x.contiguous(), weight))
        assert fp8_linear(x[:0], weight).shape == (0, 32)


@pytest.mark.parametrize(("outs", "ins"), [(40, 64), (64, 40), (1, 64)])
def test_a_weight_that_no_product_takes_stays_as_it_is(outs: int, ins: int) -> None:
    weight = draw(outs, ins)
    packed = REFERENCE.pack_linear(weight, "fp8")
    assert (packed.dtype, packed.scale_O) == (torch.float32, None)
    assert packed.num_bytes == weight.nbytes
    x, kernels = draw(3, ins), TritonKernels(torch.device("cpu"))
    torch.testing.assert_close(kernels.linear(x, packed), x @ weight.t())


def test_a_packed_weight_takes_a_byte_for_each_number_and_a_scale_for_each_feature() -> None:
    packed = pack(32, 48)
    assert (packed.dtype, packed.data.shape) == (FP8, (32, 48))
    assert packed.num_bytes == 32 * 48 + 32 * 4
