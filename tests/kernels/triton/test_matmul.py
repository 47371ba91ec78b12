"""Linear layers against float64, and their rows against the same rows in other batches."""

from __future__ import annotations

from functools import partial
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanocore.kernels.linear_weight import LinearWeight, pack_output_scales
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.kernels.triton import matmul
from nanocore.kernels.triton.matmul import Tile, choose_tile, linear
from tests.campaign import in_campaign
from tests.kernels.triton import matmul_cases
from tests.kernels.triton.compilation import SHARED_BYTES

REFERENCE = TorchKernels()
ROWS = [1, 17, *in_campaign(2, 65)]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def pack(out_features: int, in_features: int, quantization: str | None = None) -> LinearWeight:
    pack_weight = REFERENCE.pack_linear if quantization is None else pack_output_scales
    return pack_weight(draw(out_features, in_features) / 4)


def exact(x: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
    data = weight.data.double()
    if weight.scale_O is not None:
        data = data * weight.scale_O.double()[:, None]
    return F.linear(x.double(), data, None if bias is None else bias.double())


def assert_near(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("outs", "ins"), [(33, 70), (64, 64), *in_campaign((1, 1), (100, 31))])
@pytest.mark.parametrize("rows", ROWS)
def test_linear_is_exact_but_for_rounding(
    rows: int, outs: int, ins: int, has_bias: bool, quantization: str | None
) -> None:
    x, weight = draw(rows, ins), pack(outs, ins, quantization)
    bias = draw(outs) if has_bias else None
    assert_near(linear(x, weight, bias), exact(x, weight, bias))


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize(("outs", "ins"), [(66, 40), *in_campaign((2, 3), (128, 64))])
@pytest.mark.parametrize("rows", ROWS)
def test_gated_linear_is_that_of_the_reference(
    rows: int, outs: int, ins: int, activation: Literal["silu", "gelu"], quantization: str | None
) -> None:
    x, weight, bias = draw(rows, ins), pack(outs, ins, quantization), draw(outs)
    expected = REFERENCE.gated_linear(x, weight, bias, activation)
    out = linear(x, weight, bias, activation=activation)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_rows_may_lie_apart(batch_invariant: bool) -> None:
    x, weight = draw(9, 100)[::2, 5:45], pack(50, 40)
    assert_near(linear(x, weight, batch_invariant=batch_invariant), exact(x, weight, None))


def test_many_tiles_of_rows_are_each_computed_once() -> None:
    """More than one group of tiles that share their place in L2, and the last group not full."""
    x, weight = draw(300, 8), pack(100, 8)
    assert_near(linear(x, weight), exact(x, weight, None))


@pytest.mark.usefixtures("products_in_order")
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_row_has_the_same_bits_alone_and_in_a_crowd(quantization: str | None) -> None:
    x, weight = draw(70, 130), pack(40, 130, quantization)
    for activation in (None, "silu"):
        compute = partial(linear, activation=activation, batch_invariant=True)
        outs = compute(x, weight)
        for rows in (slice(0, 1), slice(69, 70), slice(20, 40)):
            assert torch.equal(compute(x[rows], weight), outs[rows])


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("columns", [1024, 6144, 151936])
def test_batch_invariant_tiles_do_not_depend_on_the_number_of_rows(
    columns: int, is_gated: bool
) -> None:
    for room in SHARED_BYTES.values():
        tiles, others = (
            {choose_tile(rows, columns, 2, is_gated, fixed, room) for rows in (1, 16, 64, 65, 5000)}
            for fixed in (True, False)
        )
        assert (len(tiles), len(others)) == (1, 3)


@pytest.mark.parametrize("room", sorted(set(SHARED_BYTES.values())))
def test_tiles_of_all_models_fit_the_shared_memory_of_all_gpus(room: int) -> None:
    variants = matmul_cases.variants(room)
    assert len(variants) > 20
    for tile, weight_bytes, is_gated in {
        (variant.tile, 1 if variant.weight == "*i8" else 2, variant.is_gated)
        for variant in variants
    }:
        assert tile.shared_bytes(weight_bytes, is_gated) <= room
        assert tile.num_stages > 2, "nothing is loaded ahead of its use"
        assert tile.block_i * weight_bytes >= 64, "a row's piece is no whole sector of memory"


def test_64_rows_of_narrow_gates_fit_a_hopper() -> None:
    tiles = [choose_tile(rows, 3072, 2, True, False, 227 << 10) for rows in (33, 40, 64)]
    assert set(tiles) == {Tile(64, 16, 128, num_warps=4, num_stages=5)}
    assert choose_tile(64, 3072, 1, False, False, 227 << 10).block_i == 256
    assert choose_tile(16, 3072, 2, True, False, 227 << 10).block_i == 256, "few rows have room"


def test_a_tile_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products read the room of the device that they run on, and are the same in any tiles."""
    rooms: list[torch.device] = []
    chosen: list[Tile] = []

    def room(device: torch.device) -> int:
        rooms.append(device)
        return 99 << 10

    def choosing(*args: int) -> Tile:
        chosen.append(choose_tile(*args))
        return chosen[-1]

    x, weight = draw(40, 16).half(), draw(10, 16).half()
    packed = REFERENCE.pack_linear(weight)
    expected = linear(x, packed, activation="silu")
    monkeypatch.setattr(matmul, "max_shared_bytes", room)
    monkeypatch.setattr(matmul, "choose_tile", choosing)
    torch.testing.assert_close(linear(x, packed, activation="silu"), expected)
    assert rooms == [x.device]
    assert chosen == [Tile(64, 16, 128, num_warps=4, num_stages=4)]


def test_logits_can_be_float32_of_anything() -> None:
    out = linear(draw(3, 16), pack(20, 16), out_dtype=torch.float64)
    assert out.dtype == torch.float64
    assert_near(out, exact(draw(3, 16), pack(20, 16), None))


def test_a_row_of_nan_spoils_no_other() -> None:
    x, weight = draw(5, 33), pack(34, 33)
    expected, gated = linear(x, weight), linear(x, weight, activation="silu")
    x[1] = torch.nan
    assert torch.equal(linear(x, weight)[2:], expected[2:])
    assert torch.equal(linear(x, weight, activation="silu")[2:], gated[2:])


def test_no_rows_are_no_work() -> None:
    assert linear(draw(1, 8)[:0], pack(6, 8)).shape == (0, 6)
    assert linear(draw(1, 8)[:0], pack(6, 8), activation="silu").shape == (0, 3)
