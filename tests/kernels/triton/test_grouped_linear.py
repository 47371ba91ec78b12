"""Products with weights of small numbers, against what they stand for, in float64."""

from __future__ import annotations

from functools import partial
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor

from nanocore.kernels.linear_weight import FP8, TokenEmbedding
from nanocore.kernels.torch.linear import gated
from nanocore.kernels.triton import grouped_linear
from nanocore.kernels.triton.grouped_linear import choose_tile, linear
from nanocore.kernels.triton.grouped_packing import GroupedLinear, pack_float8, pack_groups
from nanocore.kernels.triton.grouped_rows import dequantize, embed
from nanocore.kernels.triton.triton_backend import TritonKernels
from tests.campaign import in_campaign
from tests.kernels.drawn_weights import FORMS, draw_float8, draw_groups
from tests.kernels.triton.compilation import SHARED_BYTES
from tests.kernels.triton.grouped_linear_cases import COLUMNS, LAYOUTS, ROWS

# What is infinite on a GPU without a word, numpy warns of.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CPU = torch.device("cpu")
SHAPES = [(33, 100), *in_campaign((64, 512), (1, 31))]
"""Outputs and inputs; few are whole tiles or chunks."""


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def assert_near(out: Tensor, expected: Tensor) -> None:
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    assert error < 1e-6


@pytest.mark.parametrize("rows", [1, *in_campaign(40)])
@pytest.mark.parametrize("dtype", [torch.float16, *in_campaign(torch.float32)])
@pytest.mark.parametrize("batch_invariant", [False, *in_campaign(True)])
@pytest.mark.parametrize(("outs", "ins"), SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_linear_is_exact_but_for_the_rounding_of_sums(
    form: str, outs: int, ins: int, batch_invariant: bool, dtype: torch.dtype, rows: int
) -> None:
    weight, x, bias = draw_groups(form, outs, ins), draw(rows, ins).to(dtype), draw(outs)
    expected = F.linear(x.double(), weight.dequantize().double(), bias.double())
    out = linear(x, pack_groups(weight), bias, torch.float32, batch_invariant=batch_invariant)
    assert_near(out, expected)


@pytest.mark.parametrize(
    ("has_blocks", "dtype"),
    [
        (False, torch.float16), (True, torch.float32),
        *in_campaign((True, torch.float16), (False, torch.float32)),
    ],
)  # fmt: skip
def test_all_numbers_of_e4m3_are_what_they_are(has_blocks: bool, dtype: torch.dtype) -> None:
    weight, x = draw_float8(140, 300, has_blocks), draw(2, 300).to(dtype)
    out = linear(x, pack_float8(weight), out_dtype=torch.float32)
    assert_near(out, F.linear(x.double(), weight.dequantize().double()))
    assert torch.equal(dequantize(pack_float8(weight), torch.float32), weight.dequantize())


@pytest.mark.parametrize("has_blocks", [False, True])
def test_what_is_no_number_in_float8_does_not_become_one(has_blocks: bool) -> None:
    weight = draw_float8(140, 300, has_blocks)
    weight.values_OI.view(torch.uint8)[7, 200] = 0xFF
    out = linear(draw(2, 300), pack_float8(weight))
    assert out.isnan().any(0).nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("rows", [1, *in_campaign(16, 17)])
@pytest.mark.parametrize("form", ["zeros", *in_campaign("super", "8 bits")])
def test_a_gated_layer_is_gate_and_product(
    form: str, rows: int, activation: Literal["silu", "gelu"]
) -> None:
    weight, x, bias = draw_groups(form, 66, 100), draw(rows, 100).half(), draw(66).half()
    expected = gated(F.linear(x.double(), weight.dequantize().double(), bias.double()), activation)
    for dtype, most in ((torch.float16, 1e-3), (torch.float32, 1e-6)):
        out = linear(x.to(dtype), pack_groups(weight), bias.to(dtype), activation=activation)
        assert (out.dtype, out.shape) == (dtype, (rows, 33))
        assert (out.double() - expected).norm() < most * expected.norm()


@pytest.mark.parametrize("form", [form for form in FORMS if form != "permuted"])
def test_rows_are_what_the_weight_means_to_the_bit(form: str) -> None:
    weight = draw_groups(form, 40, 100)
    packed, exact = pack_groups(weight), weight.dequantize()
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(dequantize(packed, dtype), exact.to(dtype))
    tokens = torch.tensor([103, 139, 99, 100, 140, -1, 103])
    out = embed(tokens, TokenEmbedding(packed, 100, 11.3125, torch.float16))
    expected = torch.zeros(7, 100, dtype=torch.float16)
    for row, token in ((0, 103), (1, 139), (3, 100), (6, 103)):
        expected[row] = exact[token - 100].half() * 11.3125
    assert torch.equal(out, expected)


@pytest.mark.usefixtures("products_in_order")
@pytest.mark.parametrize("form", ["zeros", *in_campaign("super", "permuted")])
def test_a_row_has_the_same_bits_alone_and_in_a_crowd(form: str) -> None:
    x, weight = draw(40, 100).half(), pack_groups(draw_groups(form, 34, 100))
    for activation in (None, "silu"):
        compute = partial(linear, activation=activation, batch_invariant=True)
        out = compute(x, weight)
        for rows in (slice(0, 1), slice(39, 40), slice(11, 30)):
            assert torch.equal(compute(x[rows], weight), out[rows])


def test_batch_invariant_tiles_do_not_depend_on_the_number_of_rows() -> None:
    for name, room, columns in [
        (n, r, c) for n in LAYOUTS for r in SHARED_BYTES.values() for c in COLUMNS
    ]:
        tiles, others = (
            {choose_tile(rows, columns, LAYOUTS[name], False, fixed, room) for rows in ROWS}
            for fixed in (True, False)
        )
        assert len(tiles) == 1
        assert len(others) > 1


def test_tiles_of_all_layouts_fit_the_shared_memory_of_all_gpus() -> None:
    for name, layout in LAYOUTS.items():
        for room in SHARED_BYTES.values():
            for rows in ROWS:
                for columns in COLUMNS:
                    tile = choose_tile(rows, columns, layout, rows == 1, False, room)
                    assert tile.shared_bytes(layout, rows == 1) <= room, name
                    assert tile.num_stages > 1


def test_many_rows_are_a_product_of_rounded_weights() -> None:
    weight, x, bias = draw_groups("permuted", 34, 100), draw(9, 100), draw(34)
    out = grouped_linear.by_cublas(x, pack_groups(weight), bias, torch.float32)
    assert_near(out, F.linear(x.double(), weight.dequantize().double(), bias.double()))


def test_a_row_of_nan_spoils_no_other_and_no_rows_are_no_work() -> None:
    x, weight = draw(5, 100).half(), pack_groups(draw_groups("minima", 34, 100))
    expected = linear(x, weight)
    x[1] = torch.nan
    out = linear(x, weight)
    assert torch.equal(out[2:], expected[2:])
    assert out[1].isnan().all()
    assert linear(x[:0], weight).shape == (0, 34)
    assert linear(x[:0], weight, activation="silu").shape == (0, 17)


def test_packed_weights_take_little_more_than_their_bits() -> None:
    bits = {"groups of 128": 4.125, "super": 4.625, "8 bits": 8.25, "8 bits per output": 8.25}
    for form, expected in bits.items():
        packed = pack_groups(draw_groups(form, 16, 1024))
        assert packed.num_bytes * 8 / (16 * 1024) == expected, form


def test_what_no_kernel_takes_is_refused_with_what_is_wrong() -> None:
    weight = draw_groups("groups of 128", 16, 96)
    uneven = replace(weight, group_size=24, scale_OG=weight.scale_OG.expand(16, 4))
    with pytest.raises(ValueError, match="groups of 24 inputs"):
        pack_groups(uneven)
    with pytest.raises(ValueError, match="codebook"):
        pack_groups(replace(weight, codebook=torch.linspace(-1, 1, 16)))


def test_the_backend_packs_each_form_and_computes_with_it() -> None:
    kernels, steady = TritonKernels(CPU), TritonKernels(CPU, batch_invariant=True)
    x, weight = draw(2, 96), draw_groups("zeros", 48, 96)
    packed = kernels.pack_linear(weight)
    exact = F.linear(x.double(), weight.dequantize().double())
    assert_near(kernels.linear(x, packed), exact)
    assert_near(kernels.logits(x, packed, softcap=20.0), 20.0 * (exact / 20.0).tanh())
    torch.testing.assert_close(
        kernels.gated_linear(x, packed), gated(exact.float(), "silu"), rtol=1e-4, atol=1e-4
    )
    tokens = torch.tensor([3, 47])
    embedding = TokenEmbedding(packed, 0, 1.0, torch.float32)
    assert torch.equal(kernels.embedding(tokens, embedding), weight.dequantize()[tokens])
    assert isinstance(kernels.pack_linear(draw(48, 96), "int4"), GroupedLinear)
    for blocks, backend, dtype in (
        (False, kernels, FP8), (True, kernels, torch.uint8), (False, steady, torch.uint8),
    ):  # fmt: skip
        float8 = draw_float8(48, 96, blocks)
        packed = backend.pack_linear(float8)
        assert packed.dtype == dtype
        exact = F.linear(x.double(), float8.dequantize().double())
        error = (backend.linear(x, packed).double() - exact).norm() / exact.norm()
        assert error < (0.05 if dtype == FP8 else 1e-6)
    assert kernels.pack_linear(draw_float8(47, 96, False)).dtype == torch.uint8
