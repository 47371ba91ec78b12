"""The best token, noise included, against the torch reference, in native and Triton's kernels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nanocore.kernels.cpu.cpu_backend import CpuKernels
from nanocore.kernels.interface import Kernels
from nanocore.kernels.sampling import Noise, TokenPlaces
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.kernels.triton.triton_backend import TritonKernels
from tests.campaign import in_campaign
from tests.kernels.cpu_case import runnable_libraries

REFERENCE = TorchKernels()

# numpy, which interprets the kernels, warns of what a GPU does in silence.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")


@pytest.fixture(scope="module", params=["cpu", "triton"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "triton":
        return TritonKernels(torch.device("cpu"))
    return CpuKernels(next(iter(runnable_libraries().values())))


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("width", [1, 17, 500, 2049, *in_campaign(3, 2048, 9000)])
def test_of_equal_logits_the_first_is_best(kernels: Kernels, width: int) -> None:
    logits = (2 * draw(12, width)).round()
    value, column = kernels.best_token(logits, 0)
    assert torch.equal(value, logits.amax(dim=1))
    assert column.tolist() == [row.tolist().index(row.max()) for row in logits]


def test_equal_logits_of_different_programs_are_a_tie_too(kernels: Kernels) -> None:
    logits = torch.zeros(3, 10000)
    logits[0, [2500, 9999]] = 5.0
    logits[1, [9999, 4096]] = 5.0
    assert kernels.best_token(logits, 0)[1].tolist() == [2500, 4096, 0]


def test_noise_is_that_of_the_reference_but_for_rounding(kernels: Kernels) -> None:
    rows = torch.arange(150)
    seed = torch.cat((rows[:50] * 2**54 - 7, -rows[:98] * 977, torch.tensor([2**63 - 1, -(2**63)])))
    noise = Noise(torch.ones(150), seed, rows * 31)
    value, _ = kernels.best_token(torch.zeros(150, 1), 1000, noise)
    expected, _ = REFERENCE.best_token(torch.zeros(150, 1), 1000, noise)
    torch.testing.assert_close(value, expected, atol=2e-6, rtol=2e-6)
    assert value.std() > 1.0


@pytest.mark.parametrize("first_token", [0, *in_campaign(77, 151000)])
@pytest.mark.parametrize("width", [40, *in_campaign(5003)])
def test_rows_take_the_token_that_the_reference_takes(
    kernels: Kernels, width: int, first_token: int
) -> None:
    logits = 3 * draw(40, width)
    temperature = torch.tensor([0.0, 0.3, 1.0, 5.0]).repeat(10)
    noise = Noise(temperature, torch.arange(40) * 2**40 - 2**45, torch.arange(40))
    value, column = kernels.best_token(logits, first_token, noise)
    expected_value, expected_column = REFERENCE.best_token(logits, first_token, noise)
    torch.testing.assert_close(value, expected_value, atol=1e-5, rtol=1e-5)
    assert torch.equal(column, expected_column)
    assert torch.equal(column[::4], logits.argmax(dim=1)[::4])
    assert not torch.equal(column[3::4], logits.argmax(dim=1)[3::4])


def test_a_token_has_its_noise_whichever_columns_a_rank_has(kernels: Kernels) -> None:
    logits = draw(20, 90)
    noise = Noise(torch.ones(20), torch.arange(20), torch.arange(20) * 5)
    value, column = kernels.best_token(logits, 0, noise)
    parts = [kernels.best_token(logits[:, i : i + 30], i, noise) for i in (0, 30, 60)]
    values = torch.stack([part[0] for part in parts])
    best = values.argmax(dim=0)
    columns = torch.stack([part[1] + 30 * i for i, part in enumerate(parts)])
    assert torch.equal(values.amax(dim=0), value)
    assert torch.equal(columns.gather(0, best[None])[0], column)


def test_excluded_tokens_are_never_best(kernels: Kernels) -> None:
    logits = draw(20, 3000)
    logits[:, ::2] = -torch.inf
    noise = Noise(torch.full((20,), 50.0), torch.arange(20), torch.arange(20))
    assert (kernels.best_token(logits, 0, noise)[1] % 2 == 1).all()


@pytest.mark.parametrize(
    ("spoilt_by", "place"), [(torch.nan, 0), (-torch.nan, 4099), (torch.inf, 700)]
)
@pytest.mark.parametrize("temperature", [None, 0.0, 1.0])
def test_a_row_with_a_logit_that_is_not_finite_has_no_token(
    kernels: Kernels, spoilt_by: float, temperature: float | None, place: int
) -> None:
    logits = draw(3, 4100)
    logits[::2, place] = spoilt_by
    noise = None
    if temperature is not None:
        noise = Noise(torch.full((3,), temperature), torch.arange(3), torch.arange(3))
    value, column = kernels.best_token(logits, 0, noise)
    expected_value, expected_column = REFERENCE.best_token(logits, 0, noise)
    assert column.tolist() == expected_column.tolist() == [-1, expected_column[1].item(), -1]
    torch.testing.assert_close(value[1], expected_value[1])
    assert not value[::2].isfinite().any()
    assert value[::2].isnan().all() or not math.isnan(spoilt_by)


def test_a_row_of_minus_infinity_has_no_token_and_one_of_the_largest_floats_has(
    kernels: Kernels,
) -> None:
    largest = torch.finfo(torch.float32).max
    logits = torch.stack([torch.full((4100,), value) for value in (-torch.inf, largest, -largest)])
    logits[1:, 7] = -torch.inf
    value, column = kernels.best_token(logits, 0)
    assert (column.tolist(), value[0]) == ([-1, 0, 0], -torch.inf)
    assert REFERENCE.best_token(logits, 0)[1].tolist() == [-1, 0, 0]


def test_rows_may_lie_apart_and_settings_too(kernels: Kernels) -> None:
    logits, settings = draw(8, 120)[::2, 10:100], torch.arange(12.0).reshape(4, 3)
    noise = Noise(settings[:, 0] + 0.5, settings[:, 1].long(), settings.long()[:, 2])
    value, column = kernels.best_token(logits, 3, noise)
    expected = REFERENCE.best_token(logits, 3, noise)
    torch.testing.assert_close(value, expected[0])
    assert torch.equal(column, expected[1])


@pytest.mark.parametrize("width", [3, 5000])
def test_tokens_are_written_to_the_token_table_too(kernels: Kernels, width: int) -> None:
    logits = draw(6, width)
    logits[2, 1] = torch.nan
    logits[4:] = logits[4]
    rows, positions = torch.tensor([3, 0, 5, 1, 6, 6]), torch.tensor([0, 8, 4, 7, 0, 0])
    noise = Noise(torch.tensor([0.0, 1, 1, 1, 0, 0]), torch.arange(6) // 5, torch.arange(6) // 5)
    tables = [torch.full((7, 9), -7, dtype=torch.int32) for _ in range(2)]
    _, column = kernels.best_token(logits, 0, noise, TokenPlaces(tables[0], rows, positions))
    _, expected = REFERENCE.best_token(logits, 0, noise, TokenPlaces(tables[1], rows, positions))
    assert torch.equal(column, expected)
    assert torch.equal(tables[0][rows, positions].long(), column)
    assert tables[0][5, 4] == -1
    assert torch.equal(*tables)


def test_no_rows_are_no_work(kernels: Kernels) -> None:
    value, column = kernels.best_token(draw(1, 8)[:0], 0)
    assert (value.shape, column.shape, column.dtype) == ((0,), (0,), torch.int64)
