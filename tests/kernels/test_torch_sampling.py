"""Sampling: filters with worked numbers, and noise that depends on nothing it should not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanocore.kernels.backend import SamplingMetadata
from nanocore.kernels.torch_sampling import filter_logits, gumbel_noise, sample

VOCAB_SIZE = 5
# Probabilities 0.4, 0.3, 0.15, 0.1, 0.05, in shuffled order.
PROBS = torch.tensor([[0.15, 0.4, 0.05, 0.3, 0.1]])


def kept(top_k: int = VOCAB_SIZE, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    """Token ids that survive the filters."""
    filtered = filter_logits(
        PROBS.log(), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p])
    )
    return torch.isfinite(filtered[0]).nonzero().flatten().tolist()


def metadata(
    num_rows: int,
    *,
    temperature: float = 1.0,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    filters: tuple[int, float, float] | None = None,
) -> SamplingMetadata:
    top_k, top_p, min_p = filters or (VOCAB_SIZE, 1.0, 0.0)
    greedy = torch.full((num_rows,), temperature == 0.0)
    return SamplingMetadata(
        all_greedy=bool(greedy.all()),
        filters=filters is not None,
        greedy_R=greedy,
        temperature_R=torch.full((num_rows,), temperature),
        top_k_R=torch.full((num_rows,), top_k, dtype=torch.int32),
        top_p_R=torch.full((num_rows,), top_p),
        min_p_R=torch.full((num_rows,), min_p),
        seed_R=torch.zeros(num_rows, dtype=torch.int64) if seeds is None else seeds,
        position_R=torch.arange(num_rows) if positions is None else positions,
    )


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
    assert sample(logits, metadata(2, temperature=0.0)).tolist() == [1, 0]


def test_greedy_and_random_rows_mix() -> None:
    mixed = metadata(3)
    mixed = SamplingMetadata(
        **{name: getattr(mixed, name) for name in mixed.__slots__}
        | {"greedy_R": torch.tensor([False, True, False])}
    )
    logits = PROBS.log().repeat(3, 1)
    tokens = sample(logits, mixed)
    assert tokens[1] == 1
    assert tokens[[0, 2]].tolist() == sample(logits, metadata(3))[[0, 2]].tolist()


def test_noise_is_a_function_of_seed_position_and_token_alone() -> None:
    seeds, positions = torch.tensor([5, 5, 6, 2**53 - 1]), torch.tensor([1, 2, 1, 70_000])
    noise = gumbel_noise(seeds, positions, 1000)
    order = torch.tensor([3, 1, 0, 2])
    assert torch.equal(gumbel_noise(seeds[order], positions[order], 1000), noise[order])
    assert torch.equal(gumbel_noise(seeds[:1], positions[:1], 10), noise[:1, :10])
    assert len({tuple(row.tolist()) for row in noise}) == 4
    assert torch.isfinite(noise).all()


def test_noise_is_gumbel_and_its_rows_are_independent() -> None:
    noise = gumbel_noise(torch.arange(64), torch.arange(64) // 8, 4096)
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.std().item() == pytest.approx(1.2825, abs=0.01)
    correlations = torch.corrcoef(noise) - torch.eye(64)
    assert correlations.abs().max() < 0.1  # 4096 samples: standard error 0.016
    assert torch.corrcoef(noise.T[:64]).fill_diagonal_(0).abs().max() < 0.6


@pytest.mark.parametrize(
    ("temperature", "filters", "expected"),
    [
        (1.0, None, [0.15, 0.4, 0.05, 0.3, 0.1]),
        (0.5, None, [0.0789, 0.5614, 0.0088, 0.3158, 0.0351]),  # squares, normalised
        (1.0, (3, 1.0, 0.0), [0.1765, 0.4706, 0.0, 0.3529, 0.0]),
    ],
)
def test_frequencies_approach_the_probabilities(
    temperature: float, filters: tuple | None, expected: list[float]
) -> None:
    count = 20_000
    tokens = sample(
        PROBS.log().expand(count, -1), metadata(count, temperature=temperature, filters=filters)
    )
    frequencies = torch.bincount(tokens, minlength=VOCAB_SIZE) / count
    # Four standard errors of a frequency are at most 0.014 here.
    torch.testing.assert_close(frequencies, torch.tensor(expected), atol=0.014, rtol=0)
