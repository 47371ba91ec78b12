"""Edits of logits, by torch and by the native kernels, token by token as the reference has them."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanocore.kernels.candidates import NO_TOKEN
from nanocore.kernels.cpu.build import INSTRUCTION_SETS
from nanocore.kernels.interface import Kernels
from nanocore.kernels.torch import sampling as torch_sampling
from nanocore.kernels.torch.backend import TorchKernels
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.communication.communicator import SingleRank
from nanocore.worker.sampling.sampler import TokenSampler
from tests.kernels.cpu_case import reference_or_backend
from tests.logit_edits_reference import (
    EditedRow,
    draw_row,
    edit,
    places_of,
    sampled_rows,
)
from tests.sampling_reference import make_metadata

PROMPT = [1, 2, 3, 4, 2, 2, 9]
OUTPUT = [5, 6, 2, 5, 5, 6]
STOPS = (7, 8, 5)
ASKED: dict[str, Any] = {
    "allowed_token_ids": [2, 5, 6, 7, 11, 12, 5],
    "logit_bias": [(2, 1.5), (5, -100.0), (11, 0.1), (13, 100.0)],
    "min_tokens": 7,
    "bad_words_token_ids": [[10], [5, 6, 2], [6, 11], [2, 9, 9, 3], [9, 5, 6, 2, 5, 5, 6, 12]],
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.7,
    "presence_penalty": -0.4,
}


@pytest.fixture(scope="module", params=["torch", *INSTRUCTION_SETS])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return reference_or_backend(request.param)


def draw(*shape: int, seed: int = 3) -> Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def row(**asked: Any) -> EditedRow:
    return EditedRow(PROMPT, OUTPUT, EngineSamplingParams(**asked), STOPS)


def check(kernels: Kernels, logits_RV: Tensor, rows: list[EditedRow]) -> None:
    edited_RV = edit(kernels, logits_RV, rows)
    expected_RV = np.stack([r.edited(x.numpy()) for r, x in zip(rows, logits_RV, strict=True)])
    np.testing.assert_array_equal(edited_RV.numpy(), expected_RV)
    numbers = ~np.isnan(expected_RV)
    assert (edited_RV.numpy().view("i4") == expected_RV.view("i4"))[numbers].all()


@pytest.mark.parametrize(
    "names", [*combinations(ASKED, 1), *combinations(ASKED, 2), tuple(ASKED)], ids="+".join
)
def test_each_edit_each_two_and_all_are_those_of_the_reference(
    kernels: Kernels, names: tuple[str, ...]
) -> None:
    asking = row(**{name: ASKED[name] for name in names})
    logits_RV = draw(3, 20)
    check(kernels, logits_RV, [asking] * 3)
    assert not torch.equal(edit(kernels, logits_RV, [asking] * 3), logits_RV)


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 16, 33, 1030])
def test_any_rows_are_edited_as_the_reference_has_it(kernels: Kernels, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    for seed in range(12):
        rows = [draw_row(rng, vocab_size) for _ in range(rng.integers(1, 9))]
        logits_RV = draw(len(rows), vocab_size, seed=seed).round(decimals=1)  # zeros among them
        logits_RV[torch.rand(logits_RV.shape) < 0.1] = -torch.inf
        check(kernels, logits_RV, rows)


def test_a_long_row_is_counted_to_its_last_token(kernels: Kernels) -> None:
    rng = np.random.default_rng(0)
    asked = EngineSamplingParams(repetition_penalty=1.1, frequency_penalty=0.01)
    rows = [
        EditedRow(rng.integers(0, 500, 20_000).tolist(), rng.integers(0, 50, n).tolist(), asked)
        for n in (0, 1, 9_000)
    ]
    check(kernels, draw(3, 501), rows)


def test_slices_of_rows_are_edited_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(**ASKED), row(presence_penalty=1.0), row(repetition_penalty=0.5)] * 3
    monkeypatch.setattr(torch_sampling, "_SLICE_VALUES", 50)
    check(TorchKernels(), draw(9, 20), rows)


def test_rows_behind_one_another_leave_nothing_to_the_next_call(kernels: Kernels) -> None:
    """Counts are in memory that calls share; of a wider vocabulary first, and a narrower one."""
    for vocab_size in (40, 20, 60):
        for _ in range(2):
            check(kernels, draw(4, vocab_size), [row(**ASKED)] * 4)


def test_rows_of_logits_may_lie_apart(kernels: Kernels) -> None:
    wide_RV = draw(3, 40)
    view_RV = wide_RV[:, :20]
    sampled = sampled_rows([row(**ASKED)] * 3, 20)
    sampler = TokenSampler(0, 20, SingleRank(), kernels)
    places = places_of([row(**ASKED)] * 3)
    sampling = make_metadata(sampled, places)
    together = sampler.sample(view_RV.contiguous(), sampling)
    assert torch.equal(sampler.sample(view_RV, sampling), together)
    check(kernels, view_RV, [row(**ASKED)] * 3)


def test_a_token_that_is_none_counts_for_nothing(kernels: Kernels) -> None:
    """The step after the one in which a row had no token is begun before the host knows."""
    asked = EngineSamplingParams(**{**ASKED, "bad_words_token_ids": [[5, 3], [4]]})
    check(kernels, draw(1, 20), [EditedRow(PROMPT, [5, -1, 5, -1], asked, STOPS)])


def test_a_logit_that_is_not_a_number_stays_one_even_if_it_is_forbidden(kernels: Kernels) -> None:
    logits_RV = draw(2, 20)
    logits_RV[0, 1], logits_RV[1, 10] = torch.nan, torch.inf
    rows = [row(allowed_token_ids=[2, 3]), row(bad_words_token_ids=[[10]])]
    check(kernels, logits_RV, rows)
    sampler = TokenSampler(0, 20, SingleRank(), kernels)
    tokens = sampler.sample(logits_RV, make_metadata(sampled_rows(rows, 20), places_of(rows)))
    assert tokens.tolist() == [NO_TOKEN] * 2


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}])
def test_a_row_whose_every_token_is_forbidden_has_none(
    kernels: Kernels, temperature: float, filters: dict[str, Any]
) -> None:
    asked = {"temperature": temperature, **filters}
    rows = [
        row(allowed_token_ids=[4], bad_words_token_ids=[[4]], **asked),
        row(allowed_token_ids=[7, 8], min_tokens=100, **asked),
        row(allowed_token_ids=[4], **asked),
    ]
    sampler = TokenSampler(0, 20, SingleRank(), kernels)
    tokens = sampler.sample(draw(3, 20), make_metadata(sampled_rows(rows, 20), places_of(rows)))
    assert tokens.tolist() == [NO_TOKEN, NO_TOKEN, 4]


def test_min_tokens_without_a_stop_ask_for_nothing() -> None:
    sampling = EngineSamplingParams(temperature=0.0, min_tokens=5)
    rows = sampled_rows([EditedRow([1], [], sampling), EditedRow([1], [], sampling, (3,))], 20)
    assert rows.columns["processed_P"].tolist() == [1]
