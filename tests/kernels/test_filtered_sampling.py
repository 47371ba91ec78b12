"""Filters without a sort against the reference backend and a full sort, row by row."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple
from torch import Tensor

from nanocore.kernels.cpu.build import INSTRUCTION_SETS
from nanocore.kernels.gumbel_noise import gumbel_noise
from nanocore.kernels.interface import Kernels
from nanocore.kernels.sampling import Filters, Noise
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.kernels.triton import filtered_sampling
from nanocore.kernels.triton.triton_backend import TritonKernels
from tests.campaign import examples, in_campaign
from tests.kernels.cpu_case import backend
from tests.sampling_reference import Settings, filter_logits, make_metadata, make_rows

# numpy, which interprets Triton's kernels, warns of what a GPU does in silence.
pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero encountered"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),
]


@pytest.fixture(params=INSTRUCTION_SETS)
def native(request: pytest.FixtureRequest) -> Kernels:
    return backend(request.param)


def rows_of(noise: Noise, rows: torch.Tensor | slice) -> Noise:
    return Noise(*(column[rows] for column in astuple(noise)))


def in_small_parts(monkeypatch: pytest.MonkeyPatch, max_candidates: int) -> Kernels:
    """Triton's kernels; max_candidates: tokens that may stay are gathered up to so many."""
    monkeypatch.setattr(filtered_sampling, "PART_TOKENS", 128)
    monkeypatch.setattr(filtered_sampling, "BLOCK_TOKENS", 128)
    monkeypatch.setattr(filtered_sampling, "MAX_CANDIDATES", max_candidates)
    return TritonKernels(torch.device("cpu"))


@pytest.fixture(params=[4096, *in_campaign(24)], ids=str)
def interpreted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return in_small_parts(monkeypatch, request.param)


@pytest.fixture(params=[*INSTRUCTION_SETS, 4096, *in_campaign(24)], ids=str)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    if isinstance(request.param, int):
        return in_small_parts(monkeypatch, request.param)
    return backend(request.param)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(rows: list[Settings], width: int, seed: int = 0) -> tuple[Noise, Filters]:
    sampled = make_rows(rows, width, seeds=[seed + 7 * i for i in range(len(rows))])
    metadata = make_metadata(sampled, torch.arange(1000, 1000 + len(rows)))
    return metadata.noise, metadata.filters


def choose(kernels: Kernels, logits_RV: Tensor, noise: Noise, filters: Filters) -> Tensor:
    value_R, index_R = kernels.best_filtered_token(logits_RV, noise, filters)
    assert (value_R.dtype, index_R.dtype) == (torch.float32, torch.int64)
    return index_R


def check(kernels: Kernels, logits_RV: Tensor, rows: list[Settings], seed: int = 0) -> None:
    noise, filters = make(rows, logits_RV.shape[1], seed)
    chosen_R = choose(kernels, logits_RV, noise, filters)
    assert chosen_R.tolist() == by_torch(logits_RV, noise, filters).tolist()
    assert chosen_R.tolist() == by_sort(logits_RV, noise, filters).tolist()


def by_torch(logits_RV: Tensor, noise: Noise, filters: Filters) -> Tensor:
    return TorchKernels().best_filtered_token(logits_RV, noise, filters)[1]


def by_sort(logits_RV: Tensor, noise: Noise, filters: Filters) -> Tensor:
    scaled_RV = logits_RV / noise.temperature_R[:, None]
    kept_RV = filter_logits(scaled_RV, filters.top_k_R, filters.top_p_R, filters.min_p_R)
    token_ids_V = torch.arange(logits_RV.shape[1])
    return (kept_RV + gumbel_noise(noise.seed_R, noise.position_R, token_ids_V)).argmax(dim=1)


def draw_logits(rng: np.random.Generator, kind: str, width: int) -> Tensor:
    logits = rng.standard_normal(width).astype(np.float32)
    match kind:
        case "flat":
            logits *= 0.01
        case "peaked":
            logits *= 12
        case "equal":
            logits[:] = logits[0]
        case "tied":
            logits = np.round(logits * 2) / 2
        case "huge":
            logits *= 1e30
        case "tiny":
            logits *= 1e-42
        case "one outlier":
            logits = logits * 1e-3 - 50
            logits[rng.integers(width)] = 40
        case "mostly excluded":
            logits[rng.random(width) < 0.97] = -np.inf
            logits[rng.integers(width)] = 1.0
        case "zeros of both signs":
            logits = np.where(logits > 0, np.float32(0.0), np.float32(-0.0))
        case "rounded to bfloat16":
            return torch.from_numpy(logits * 4).bfloat16().float()
    return torch.from_numpy(logits)


KINDS = ("normal", "flat", "peaked", "equal", "tied", "huge", "tiny", "one outlier",
         "mostly excluded", "zeros of both signs", "rounded to bfloat16")  # fmt: skip

row_settings = st.tuples(
    st.sampled_from([1e-5, 0.01, 0.6, 1.0, 1.7, 30.0, 3e38]),
    st.one_of(st.just(0), st.integers(1, 400), st.integers(1, 6000)),
    st.sampled_from([1.0, 1e-50, 1e-6, 0.01, 0.1, 0.3, 0.5, 0.77, 0.9, 0.95, 0.9999, 1 - 2**-24]),
    st.sampled_from([0.0, 0.0, 1e-30, 1e-6, 0.01, 0.05, 1 / math.e, 0.5, 1.0]),
)


@given(
    st.integers(0, 2**32),
    st.one_of(st.integers(1, 300), st.sampled_from([1024, 2048, 5003])),
    st.lists(st.tuples(st.sampled_from(KINDS), row_settings), min_size=1, max_size=5),
)
@settings(
    deadline=None,
    max_examples=examples(100),
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@example(1, 2048, [(kind, (1.0, 0, 0.3, 0.0)) for kind in KINDS])
@example(1, 2048, [(kind, (3e38, 0, 0.3, 0.0)) for kind in KINDS])
@example(0, 7, [("flat", (3e38, 0, 1e-6, 0.0)) for _ in range(20)])
@example(1, 2048, [(kind, (1.0, 700, 0.95, 0.0)) for kind in KINDS])
@example(1, 2048, [(kind, (1.0, 700, 1.0, 0.01)) for kind in KINDS])
def test_rows_take_the_token_that_the_reference_and_a_sort_give(
    native: Kernels, seed: int, width: int, cases: list[tuple[str, Settings]]
) -> None:
    rng = np.random.default_rng(seed)
    logits_RV = torch.stack([draw_logits(rng, kind, width) for kind, _ in cases])
    check(native, logits_RV, [row for _, row in cases], seed)


@pytest.mark.parametrize("kind", ["flat", "normal", "peaked", "tied"])
def test_a_vocabulary_of_real_size(native: Kernels, kind: str) -> None:
    rows = [(1.0, 0, 0.95, 0.0), (1.0, 50, 1.0, 0.0), (0.7, 50, 0.95, 0.05), (1.0, 0, 0.4, 0.0),
            (1.0, 9000, 0.9, 0.0), (1.0, 0, 1.0, 0.05)]  # fmt: skip
    rng = np.random.default_rng(5)
    logits_RV = torch.stack([draw_logits(rng, kind, 50_021) for _ in rows])
    noise, filters = make(rows, 50_021)
    chosen_R = choose(native, logits_RV, noise, filters)
    assert chosen_R.tolist() == by_torch(logits_RV, noise, filters).tolist()


@pytest.mark.parametrize("width", [7, 300, 5000])
@pytest.mark.parametrize(
    ("row", "num_kept"),
    [
        ((1.0, 3, 1.0, 0.0), lambda width: 3),
        ((1.0, 0, 0.5, 0.0), lambda width: -(-width // 2)),
        ((1.0, 0, 0.25, 0.0), lambda width: -(-width // 4)),
        ((1.0, 4, 0.5, 0.0), lambda width: 2),
        ((1.0, 0, 1e-6, 0.0), lambda width: 1),
    ],
)
def test_where_top_p_is_a_sum_to_the_bit_the_token_after_it_goes(
    native: Kernels, width: int, row: Settings, num_kept: object
) -> None:
    """Of equal logits every weight is 1: p of n is met by p n tokens, and the smallest ids stay.

    Each of many rows' tokens is the one with the most noise of those that stay.
    """
    assert callable(num_kept)
    rows = [row] * 200
    noise, filters = make(rows, width)
    stay = torch.arange(num_kept(width))
    expected_R = gumbel_noise(noise.seed_R, noise.position_R, stay).argmax(dim=1)
    chosen_R = choose(native, torch.full((200, width), 2.5), noise, filters)
    assert chosen_R.tolist() == expected_R.tolist()
    assert chosen_R.tolist() == by_torch(torch.full((200, width), 2.5), noise, filters).tolist()


def test_a_row_depends_on_no_other_and_on_no_thread(native: Kernels) -> None:
    rng = np.random.default_rng(2)
    rows = [(0.9, 0, 0.6, 0.0), (1.0, 40, 0.9, 0.0), (1.0, 0, 0.95, 0.02), (1.0, 300, 1.0, 0.0)] * 8
    logits_RV = torch.stack([draw_logits(rng, KINDS[i % 3], 3001) for i in range(len(rows))])
    noise, filters = make(rows, 3001)
    together = native.best_filtered_token(logits_RV, noise, filters)
    for i in range(len(rows)):
        one = slice(i, i + 1)
        alone = native.best_filtered_token(
            logits_RV[one].clone(), rows_of(noise, one), filters.of_rows(one)
        )
        assert [x[i].item() for x in together] == [x[0].item() for x in alone]


def test_the_value_is_the_noisy_logit(native: Kernels) -> None:
    logits_RV = torch.randn(20, 500, generator=torch.Generator().manual_seed(1))
    noise, filters = make([(0.5, 20, 0.9, 0.0)] * 20, 500)
    value_R, index_R = native.best_filtered_token(logits_RV, noise, filters)
    noise_R = gumbel_noise(noise.seed_R, noise.position_R, index_R[:, None])[:, 0]
    expected_R = logits_RV.gather(1, index_R[:, None])[:, 0] / 0.5 + noise_R
    torch.testing.assert_close(value_R, expected_R, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [*in_campaign(1, 2, 63), 300])
def test_filters_of_every_kind_in_triton(interpreted: Kernels, width: int) -> None:
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
    check(interpreted, 3 * draw(len(rows), width), rows)


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
    interpreted: Kernels, width: int, seed: int, spread: float, rows: list[Settings]
) -> None:
    """Logits are a few values, so that most cuts are among equals."""
    check(interpreted, (spread * draw(len(rows), width, seed=seed)).round(), rows)


def test_of_equal_tokens_the_right_number_stays(kernels: Kernels) -> None:
    for setting, kept in (((1.0, 2, 1.0, 0.0), 2), ((1.0, 0, 0.25, 0.0), 3)):
        column = choose(kernels, torch.zeros(8, 10), *make([setting] * 8, 10))
        assert set(column.tolist()) == set(range(kept))


def test_excluded_tokens_are_not_sampled(kernels: Kernels) -> None:
    logits = draw(2, 200)
    logits[:, ::2] = -torch.inf
    for setting in ((5.0, 150, 1.0, 0.0), (5.0, 0, 0.99, 0.0), (5.0, 0, 1.0, 0.0)):
        assert (choose(kernels, logits, *make([setting] * 2, 200)) % 2 == 1).all()


@pytest.mark.parametrize(
    ("spoilt_by", "place"),
    [(torch.nan, 0), (torch.inf, 77), *in_campaign((-torch.nan, 149), (torch.nan, 129))],
)
def test_a_row_with_a_logit_that_is_not_finite_has_no_token_and_spoils_no_other(
    kernels: Kernels, spoilt_by: float, place: int
) -> None:
    rows = [(1.0, 5, 0.9, 0.1), (1.0, 0, 0.9, 0.0), (1.0, 5, 1.0, 0.0), (1.0, 0, 1.0, 0.1)]
    rows += rows[:1]
    logits_RV = draw(5, 150)
    noise, filters = make(rows, 150)
    expected_R = choose(kernels, logits_RV, noise, filters)
    logits_RV[:4, place] = spoilt_by
    logits_RV[:4, (place + 40) % 150] = -torch.inf
    chosen_R = choose(kernels, logits_RV, noise, filters)
    assert chosen_R.tolist() == [-1, -1, -1, -1, *expected_R[4:].tolist()]
    assert by_torch(logits_RV, noise, filters).tolist() == chosen_R.tolist()


def test_a_row_of_minus_infinity_has_no_token(kernels: Kernels) -> None:
    noise, filters = make([(1.0, 5, 0.9, 0.1), (1.0, 0, 0.9, 0.0)], 40)
    logits_RV = torch.full((2, 40), -torch.inf)
    assert choose(kernels, logits_RV, noise, filters).tolist() == [-1, -1]
    assert by_torch(logits_RV, noise, filters).tolist() == [-1, -1]


def test_rows_may_lie_apart_and_no_rows_are_no_work(kernels: Kernels) -> None:
    logits_RV = draw(12, 300)[::2, 40:240]
    noise, filters = make([(1.0, 9, 0.9, 0.01)] * 6, 200)
    expected = choose(kernels, logits_RV.contiguous(), noise, filters)
    assert torch.equal(choose(kernels, logits_RV, noise, filters), expected)
    none = slice(0, 0)
    assert choose(kernels, logits_RV[none], rows_of(noise, none), filters.of_rows(none)).shape == (
        0,
    )
