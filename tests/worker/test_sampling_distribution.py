"""Sampling with worked numbers: what filters keep, and how often each token is drawn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanocore.kernels.torch.backend import TorchKernels
from nanocore.worker.communication.communicator import SingleRank
from nanocore.worker.sampling.sampler import TokenSampler
from tests.sampling_reference import Settings, filter_logits, make_metadata, make_rows

VOCAB_SIZE = 5
GREEDY: Settings = (0.0, 0, 1.0, 0.0)
PLAIN: Settings = (1.0, 0, 1.0, 0.0)
# Probabilities 0.4, 0.3, 0.15, 0.1, 0.05, in shuffled order.
PROBS = torch.tensor([[0.15, 0.4, 0.05, 0.3, 0.1]])


def kept(top_k: int = VOCAB_SIZE, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    filtered = filter_logits(
        PROBS.log(), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p])
    )
    return torch.isfinite(filtered[0]).nonzero().flatten().tolist()


def draw(rows: list[Settings], logits_RV: Tensor) -> Tensor:
    vocab_size = logits_RV.shape[1]
    sampler = TokenSampler(0, vocab_size, SingleRank(), TorchKernels())
    sampled = make_rows(rows, vocab_size, [0] * len(rows))
    return sampler.sample(logits_RV, make_metadata(sampled, torch.arange(len(rows))))


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [0, 1, 3]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.71}, [0, 1, 3]),
        ({"top_p": 1e-9}, [1]),
        ({"min_p": 0.3}, [0, 1, 3]),  # at least 0.12
        ({"min_p": 1.0}, [1]),
        ({"top_k": 2, "top_p": 0.5}, [1]),  # top_p among what top_k left: 0.4 of 0.7
        ({"min_p": 0.2, "top_k": 4, "top_p": 0.85}, [0, 1, 3]),
    ],
)
def test_filters_keep_what_they_should(filters: dict, expected: list[int]) -> None:
    assert kept(**filters) == expected


def test_equal_logits_are_kept_in_the_order_of_their_ids() -> None:
    filtered = filter_logits(
        torch.zeros(1, 4), torch.tensor([2]), torch.tensor([1.0]), torch.tensor([0.0])
    )
    assert torch.isfinite(filtered[0]).tolist() == [True, True, False, False]


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, -1.0, 0.0]])
    assert draw([GREEDY, GREEDY], logits).tolist() == [1, 0]


def test_greedy_and_random_rows_mix() -> None:
    logits = PROBS.log().repeat(3, 1)
    tokens = draw([PLAIN, GREEDY, PLAIN], logits)
    assert tokens[1] == 1
    assert tokens[[0, 2]].tolist() == draw([PLAIN] * 3, logits)[[0, 2]].tolist()


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (PLAIN, [0.15, 0.4, 0.05, 0.3, 0.1]),
        ((0.5, 0, 1.0, 0.0), [0.0789, 0.5614, 0.0088, 0.3158, 0.0351]),  # squares, normalised
        ((1.0, 3, 1.0, 0.0), [0.1765, 0.4706, 0.0, 0.3529, 0.0]),
    ],
)
def test_frequencies_approach_the_probabilities(row: Settings, expected: list[float]) -> None:
    count = 20_000
    tokens = draw([row] * count, PROBS.log().expand(count, -1))
    frequencies = torch.bincount(tokens, minlength=VOCAB_SIZE) / count
    # Four standard errors of a frequency are at most 0.014 here.
    torch.testing.assert_close(frequencies, torch.tensor(expected), atol=0.014, rtol=0)
