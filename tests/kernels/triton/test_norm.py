"""RMS norms against the torch reference."""

from __future__ import annotations

import pytest
import torch

from nanocore.kernels.torch.backend import TorchKernels
from nanocore.kernels.triton import norm

REFERENCE = TorchKernels()
SIZES = [1, 7, 64, 1000, 8193]


def draw(*shape: int) -> torch.Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("leading", [(1,), (5,), (2, 3), ()])
def test_norm_is_that_of_the_reference(leading: tuple[int, ...], size: int) -> None:
    x, weight = draw(*leading, size), draw(size)
    torch.testing.assert_close(
        norm.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5), atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("size", SIZES)
def test_norm_of_a_sum_leaves_the_sum_in_residual(size: int) -> None:
    x, residual, weight = draw(4, size), draw(5, size)[1:].flip(0), draw(size)
    expected = REFERENCE.add_rms_norm(x, residual, weight, 1e-6)
    normed, total = norm.add_rms_norm(x, residual, weight, 1e-6)
    assert total is residual
    assert torch.equal(total, expected[1])
    torch.testing.assert_close(normed, expected[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("size", [40, 9000])
def test_rows_may_lie_apart(size: int) -> None:
    x, residual, weight = draw(4, 2 * size)[:, :size], draw(4, size + 8)[:, :size], draw(size)
    expected = REFERENCE.add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(norm.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))
    torch.testing.assert_close(norm.add_rms_norm(x, residual, weight, 1e-6), expected)


@pytest.mark.parametrize("size", SIZES)
def test_of_selected_rows_the_sums_are_normed_and_not_kept(size: int) -> None:
    """A row may be selected more than once, as padding is."""
    x, residual, weight = draw(6, size), draw(7, size)[1:].flip(0), draw(size)
    index, before = torch.tensor([4, 0, 0, 5, 0]), (x.clone(), residual.clone())
    normed = norm.select_add_rms_norm(x, residual, index, weight, 1e-6)
    expected = REFERENCE.select_add_rms_norm(x, residual, index, weight, 1e-6)
    torch.testing.assert_close(normed, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        normed, REFERENCE.add_rms_norm(x, residual, weight, 1e-6)[0][index], atol=1e-6, rtol=1e-5
    )
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    assert torch.equal(normed, norm.add_rms_norm(x, residual, weight, 1e-6)[0][index])


def test_of_no_selected_rows_there_is_nothing_to_norm() -> None:
    x, index = draw(3, 8), torch.zeros(0, dtype=torch.int64)
    assert norm.select_add_rms_norm(x, x.clone(), index, draw(8), 1e-6).shape == (0, 8)


def test_eps_counts_where_values_are_small() -> None:
    x, weight = 1e-3 * draw(3, 32), draw(32)
    small, large = (norm.rms_norm(x, weight, eps) for eps in (1e-12, 1e-2))
    torch.testing.assert_close(large, REFERENCE.rms_norm(x, weight, 1e-2))
    assert not torch.allclose(small, large)


def test_no_rows_are_no_work() -> None:
    x, weight = draw(1, 8)[:0], draw(8)
    assert norm.rms_norm(x, weight, 1e-6).shape == (0, 8)
    assert norm.add_rms_norm(x, x.clone(), weight, 1e-6)[0].shape == (0, 8)


def test_a_row_of_nan_spoils_no_other() -> None:
    x, weight = draw(3, 64), draw(64)
    expected = norm.rms_norm(x, weight, 1e-6)
    x[1] = torch.nan
    assert torch.equal(norm.rms_norm(x, weight, 1e-6)[::2], expected[::2])
