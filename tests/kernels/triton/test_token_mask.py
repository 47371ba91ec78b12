"""Masks in Triton's sampling kernels: as logits of minus infinity, to the bit."""

from __future__ import annotations

import pytest
import torch

from nanocore.kernels.sampling import TokenPlaces
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.kernels.triton import filtered_sampling, sampling
from tests.campaign import in_campaign
from tests.kernels.mask_case import MaskedRows, draw_filters, draw_noise

# numpy, which interprets the kernels, warns of what a GPU does in silence.
pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero encountered"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),
]

WIDTHS = [150, *in_campaign(1, 33, 300)]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_PART", 128)
    monkeypatch.setattr(filtered_sampling, "PART_TOKENS", 128)
    monkeypatch.setattr(filtered_sampling, "BLOCK_TOKENS", 128)


@pytest.mark.parametrize("first_token", [45, *in_campaign(0, 32, 151_000)])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_best_token_is_that_of_logits_with_minus_infinity(width: int, first_token: int) -> None:
    for seed in range(4):
        rows = MaskedRows.draw(seed, 3, width, first_token)
        noise = draw_noise(seed, 3) if seed % 2 else None
        before_RV = rows.logits_RV.clone()
        ours = sampling.best_token(rows.logits_RV, first_token, noise, mask=rows.mask)
        rows.assert_same(ours, sampling.best_token(rows.filled_RV, first_token, noise))
        _, expected = TorchKernels().best_token(rows.logits_RV, first_token, noise, mask=rows.mask)
        assert ours[1].tolist() == expected.tolist()
        assert torch.equal(rows.logits_RV.view(torch.int32), before_RV.view(torch.int32))


@pytest.mark.parametrize("seed", [2, *in_campaign(0, 1)])
@pytest.mark.parametrize("max_candidates", [24, *in_campaign(4096)])
@pytest.mark.parametrize("width", WIDTHS)
def test_filters_are_of_what_the_mask_allows(
    width: int, max_candidates: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the tokens that may stay are gathered, or are often too many."""
    monkeypatch.setattr(filtered_sampling, "MAX_CANDIDATES", max_candidates)
    rows = MaskedRows.draw(seed, 2, width)
    noise, filters = draw_noise(seed, 2, may_be_greedy=False), draw_filters(seed, 2, width)
    before_RV = rows.logits_RV.clone()
    ours = filtered_sampling.best_filtered_token(rows.logits_RV, noise, filters, rows.mask)
    theirs = filtered_sampling.best_filtered_token(rows.filled_RV, noise, filters)
    rows.assert_same(ours, theirs)
    _, expected = TorchKernels().best_filtered_token(rows.logits_RV, noise, filters, rows.mask)
    assert ours[1].tolist() == expected.tolist()
    assert torch.equal(rows.logits_RV.view(torch.int32), before_RV.view(torch.int32))


def test_a_top_k_of_more_than_the_mask_allows_gathers_what_it_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(filtered_sampling, "MAX_CANDIDATES", 24)
    searched: list[bool] = []
    choose = filtered_sampling.choose_kernel

    class Watched:
        """`choose_kernel`, and what it was handed."""

        def __getitem__(self, grid: tuple[int]) -> object:
            def launch(*operands: object, **options: object) -> None:
                [row_count] = [x for x in operands if getattr(x, "shape", None) == (1, 2)]
                searched.append(bool(row_count[0, 0] == 0))  # type: ignore[index]
                choose[grid](*operands, **options)

            return launch

    monkeypatch.setattr(filtered_sampling, "choose_kernel", Watched())
    logits_RV = torch.randn(1, 300, generator=torch.Generator().manual_seed(0))
    words_MW = torch.zeros(1, 10, dtype=torch.int32)
    words_MW[0, [2, 7]] = 0x00F00F00
    noise, filters = draw_noise(0, 1, may_be_greedy=False), draw_filters(0, 1, 300)
    filters.top_k_R[:], filters.top_p_R[:], filters.min_p_R[:] = 50, 1.0, 0.0
    mask = filtered_sampling.TokenMask(words_MW, torch.zeros(1, dtype=torch.int32))
    _, column = filtered_sampling.best_filtered_token(logits_RV, noise, filters, mask)
    assert column[0] in mask.is_allowed(0, 300)[0].nonzero()
    assert searched == [False]


def test_tokens_of_masked_rows_go_to_the_token_table_too() -> None:
    rows = MaskedRows.draw(5, 4, 70, spoilt=0.0)
    table = torch.full((4, 3), -7, dtype=torch.int32)
    places = TokenPlaces(table, torch.tensor([3, 0, 2, 1]), torch.tensor([0, 2, 1, 1]))
    _, column = sampling.best_token(rows.logits_RV, 0, None, places, rows.mask)
    assert torch.equal(table[places.rows_R, places.positions_R].long(), column)
