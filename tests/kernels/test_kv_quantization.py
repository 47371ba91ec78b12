"""Quantized K and V: the error of a value, rows of zeros, and what a token costs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanocore.kernels.attention import AttentionSpec
from nanocore.kernels.kv_quantization import (
    QUANTIZED_KV_CACHES,
    KVCacheFormat,
    kv_cache_format,
    quantize,
    scale_dtype,
)
from nanocore.kernels.torch.attention import store_kv
from tests.kernels.paged_case import PagedCase

INT8, FP8 = (kv_cache_format(name, torch.bfloat16) for name in ("int8", "fp8"))


def round_trip(x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x as it is read back, and its scales, both float64."""
    stored = kv_cache_format(name, torch.bfloat16)
    assert stored.scale_dtype is not None
    values, scale = quantize(x, stored.dtype, stored.scale_dtype)
    assert values.dtype == stored.dtype
    assert scale.dtype == stored.scale_dtype
    assert scale.shape == x.shape[:-1]
    return values.double() * scale.double()[..., None], scale.double()[..., None]


@given(exponent=st.integers(-20, 12), seed=st.integers(0, 1000), dtype=st.sampled_from(["b", "f"]))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_errors_are_half_a_step_of_int8_and_a_sixteenth_of_fp8(
    exponent: int, seed: int, dtype: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(9, 3, 32, generator=generator) * 2.0**exponent
    x = x.bfloat16() if dtype == "b" else x
    read, scale = round_trip(x, "int8")
    assert ((read - x.double()).abs() <= scale * 0.5001).all()
    assert (scale <= x.double().abs().amax(-1, keepdim=True) / 127 * (1 + 2.0**-8)).all()
    read, scale = round_trip(x, "fp8")
    # Half a unit in the last of 4 bits, or of the subnormals; the largest may lose 2^-8 more.
    bound = torch.maximum(x.double().abs() * (2.0**-4 + 2.0**-8), scale * 2.0**-10)
    assert ((read - x.double()).abs() <= bound).all()


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_rows_of_zeros_stay_zero_beside_others(name: str) -> None:
    x = torch.zeros(2, 2, 8)
    x[1, 0, 3] = -5.0
    read, _ = round_trip(x, name)
    assert read[0].abs().max() == read[1, 1].abs().max() == 0
    assert read[1, 0, 3] == pytest.approx(-5.0, rel=2.0**-8)


def test_a_cache_is_of_the_models_dtype_unless_another_is_named() -> None:
    assert kv_cache_format("auto", torch.float16) == KVCacheFormat(torch.float16)
    assert kv_cache_format("auto", torch.bfloat16).bytes_per_head(64) == 128
    assert kv_cache_format("int8", torch.bfloat16) == INT8
    with pytest.raises(ValueError, match="unknown KV cache dtype 'int4'; known: auto, int8, fp8"):
        kv_cache_format("int4", torch.bfloat16)


def test_a_quantized_token_takes_half_of_a_bfloat16_one_and_a_scale() -> None:
    assert INT8.bytes_per_head(64) == FP8.bytes_per_head(64) == 66
    assert INT8.bytes_per_head(128) == 130


def test_on_cuda_a_scale_takes_four_bytes_and_is_the_same_number() -> None:
    x = torch.randn(9, 3, 32, generator=torch.Generator().manual_seed(0))
    for name, dtype in QUANTIZED_KV_CACHES.items():
        stored = kv_cache_format(name, torch.bfloat16, "cuda")
        assert stored == KVCacheFormat(dtype, torch.float32)
        assert stored.bytes_per_head(64) == 68
        (values, scale), (same_values, same_scale) = (
            quantize(x, dtype, scale_dtype(device)) for device in ("cuda", "cpu")
        )
        assert scale.dtype == torch.float32
        assert torch.equal(values.view(torch.uint8), same_values.view(torch.uint8))
        assert torch.equal(scale, same_scale.float())


@pytest.mark.parametrize(("name", "tolerance"), [("int8", 0.02), ("fp8", 0.1)])
def test_attention_over_a_quantized_cache_stays_near_that_over_the_values(
    name: str, tolerance: float
) -> None:
    seqs = [(40, 1), (17, 1), (64, 30)]
    exact = PagedCase(seqs).expected()
    quantized = PagedCase(seqs, kv_cache=name, spec=AttentionSpec(scale=0.25)).run().double()
    error = (quantized - exact).norm() / exact.norm()
    assert 0 < error < tolerance


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_padding_tokens_leave_a_quantized_cache_as_it_was(name: str) -> None:
    case = PagedCase([(3, 3)], kv_cache=name)
    cache = case.cache
    tensors = [cache.k_NSKD, cache.v_NSKD, cache.k_scale_NSK, cache.v_scale_NSK]
    before = [x.clone() for x in tensors if x is not None]
    store_kv(case.k[0], case.v[0], cache, torch.tensor([-1, -1, -1]))
    for x, old in zip(tensors, before, strict=True):
        assert x is not None
        assert torch.equal(x.view(torch.uint8), old.view(torch.uint8))


@pytest.mark.parametrize("name", QUANTIZED_KV_CACHES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so_and_harms_no_other_head(name: str, value: float) -> None:
    x = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(1))
    expected, _ = round_trip(x, name)
    x[2, 1, 5] = value
    got, _ = round_trip(x, name)
    assert not got[2, 1].isfinite().any()
    got[2, 1] = expected[2, 1]
    assert torch.equal(got, expected)
