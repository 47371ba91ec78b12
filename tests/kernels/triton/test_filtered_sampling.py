"""Filters without a sort against the reference backend and a full sort, token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanocore.kernels.gumbel_noise import gumbel_noise
from nanocore.kernels.interface import Filters, Noise
from nanocore.kernels.torch_backend import TorchKernels
from nanocore.kernels.triton import filtered_sampling
from tests.campaign import examples, in_campaign
from tests.sampling_reference import Settings, filter_logits, make_metadata, make_rows

# numpy, which interprets the kernels, warns of what a GPU does in silence.
pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero encountered"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),
]


@pytest.fixture(
    params=[4096, pytest.param(24, marks=pytest.mark.campaign)],
    ids=["gathered", "often too many to gather"],
    autouse=True,
)
def small_parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filtered_sampling, "PART_TOKENS", 128)
    monkeypatch.setattr(filtered_sampling, "BLOCK_TOKENS", 128)
    monkeypatch.setattr(filtered_sampling, "MAX_CANDIDATES", request.param)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(rows: list[Settings], width: int, position: int = 0) -> tuple[Noise, Filters]:
    sampled = make_rows(rows, width, seeds=[7 * i - 3 for i in range(len(rows))])
    metadata = make_metadata(sampled, torch.arange(position, position + len(rows)))
    return metadata.noise, metadata.filters


def choose(logits_RV: Tensor, noise: Noise, filters: Filters) -> Tensor:
    value_R, column_R = filtered_sampling.best_filtered_token(logits_RV, noise, filters)
    assert (value_R.dtype, column_R.dtype) == (torch.float32, torch.int64)
    return column_R


def choose_by_sort(logits_RV: Tensor, noise: Noise, filters: Filters) -> Tensor:
    scaled_RV = logits_RV / noise.temperature_R[:, None]
    kept_RV = filter_logits(scaled_RV, filters.top_k_R, filters.top_p_R, filters.min_p_R)
    token_ids_V = torch.arange(logits_RV.shape[1])
    return (kept_RV + gumbel_noise(noise.seed_R, noise.position_R, token_ids_V)).argmax(dim=1)


def assert_as_the_reference(logits_RV: Tensor, rows: list[Settings], position: int = 0) -> None:
    width = logits_RV.shape[1]
    noise, filters = make(rows, width, position)
    _, expected_R = TorchKernels().best_filtered_token(logits_RV, noise, filters)
    column_R = choose(logits_RV, noise, filters)
    assert column_R.tolist() == expected_R.tolist()
    assert column_R.tolist() == choose_by_sort(logits_RV, noise, filters).tolist()


@pytest.mark.parametrize("width", [*in_campaign(1, 2, 63), 300])
def test_rows_take_the_token_that_the_reference_takes(width: int) -> None:
    rows = [
        (1.0, 1, 1.0, 0.0),
        (1.0, 20, 1.0, 0.0),
        (0.7, 20, 0.8, 0.0),
        (1.0, 0, 0.9, 0.0),
        (2.0, 0, 0.999, 0.0),
        (1.0, 0, 1e-6, 0.0),
        (1.0, 0, 1.0, 0.05),
        (1.5, 50, 0.95, 0.01),
        (1.0, 0, 0.5, 0.2),
    ]
    assert_as_the_reference(3 * draw(len(rows), width), rows, position=1000)


@given(
    st.integers(1, 150),
    st.integers(0, 2**32),
    st.sampled_from([0.5, 1.0, 4.0]),
    st.lists(
        st.tuples(
            st.sampled_from([0.5, 1.0, 2.0]),
            st.integers(0, 160),
            st.sampled_from([1.0, 1e-30, 1e-9, 0.1, 0.31, 0.5, 0.77, 0.95, 0.9999]),
            st.sampled_from([0.0, 0.0, 0.01, 0.2, 0.7, 1.0]),
        ),
        min_size=1,
        max_size=3,
    ),
)
@settings(
    deadline=None,
    max_examples=examples(12),
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_ties_are_cut_where_the_reference_cuts_them(
    width: int, seed: int, spread: float, rows: list[Settings]
) -> None:
    """Logits are a few values, so that most cuts are among equals."""
    assert_as_the_reference((spread * draw(len(rows), width, seed=seed)).round(), rows)


def test_of_equal_tokens_the_right_number_stays() -> None:
    for setting, kept in (((1.0, 2, 1.0, 0.0), 2), ((1.0, 0, 0.25, 0.0), 3)):
        column = choose(torch.zeros(8, 10), *make([setting] * 8, 10))
        assert set(column.tolist()) == set(range(kept))


def test_excluded_tokens_are_not_sampled() -> None:
    logits = draw(2, 200)
    logits[:, ::2] = -torch.inf
    for setting in ((5.0, 150, 1.0, 0.0), (5.0, 0, 0.99, 0.0), (5.0, 0, 1.0, 0.0)):
        assert (choose(logits, *make([setting] * 2, 200)) % 2 == 1).all()


@pytest.mark.parametrize(
    ("spoilt_by", "place"), [(torch.nan, 0), *in_campaign((-torch.nan, 149), (torch.inf, 77))]
)
def test_a_row_with_a_logit_that_is_not_finite_has_no_token_and_spoils_no_other(
    spoilt_by: float, place: int
) -> None:
    rows = [(1.0, 5, 0.9, 0.1), (1.0, 0, 0.9, 0.0), (1.0, 5, 1.0, 0.0), (1.0, 0, 1.0, 0.1)]
    logits, (noise, filters) = draw(5, 150), make([*rows, rows[0]], 150)
    expected = choose_by_sort(logits, noise, filters)
    logits[:4, place] = spoilt_by
    assert choose(logits, noise, filters).tolist() == [-1, -1, -1, -1, expected[4].item()]


def test_a_row_of_minus_infinity_has_no_token() -> None:
    noise, filters = make([(1.0, 5, 0.9, 0.1)], 150)
    assert choose(torch.full((1, 150), -torch.inf), noise, filters).tolist() == [-1]


def test_rows_may_lie_apart() -> None:
    logits = draw(12, 300)[::2, 40:240]
    noise, filters = make([(1.0, 9, 0.9, 0.01)] * 6, 200)
    assert torch.equal(choose(logits, noise, filters), choose_by_sort(logits, noise, filters))


def test_no_rows_are_no_work() -> None:
    noise, filters = make([(1.0, 9, 0.9, 0.01)], 8)
    noise = Noise(noise.temperature_R[:0], noise.seed_R[:0], noise.position_R[:0])
    filters = Filters(filters.top_k_R[:0], filters.top_p_R[:0], filters.min_p_R[:0])
    assert choose(draw(1, 8)[:0], noise, filters).shape == (0,)
