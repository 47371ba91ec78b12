"""Noise that depends on nothing it should not, and is as Gumbel's distribution says."""

from __future__ import annotations

import pytest
import torch

from nanocore.kernels.gumbel_noise import gumbel_noise


def test_noise_is_a_function_of_seed_position_and_token_alone() -> None:
    seeds, positions = torch.tensor([5, 5, 6, 2**53 - 1]), torch.tensor([1, 2, 1, 70_000])
    noise = gumbel_noise(seeds, positions, torch.arange(1000))
    order = torch.tensor([3, 1, 0, 2])
    assert torch.equal(
        gumbel_noise(seeds[order], positions[order], torch.arange(1000)), noise[order]
    )
    few = torch.tensor([[7, 999, 500], [3, 0, 31]])
    of_few = gumbel_noise(seeds[:2], positions[:2], few)
    assert torch.equal(of_few, noise[:2].gather(1, few))
    assert len({tuple(row.tolist()) for row in noise}) == 4
    assert torch.isfinite(noise).all()


def test_noise_is_finite_where_a_uniform_would_round_to_one() -> None:
    """An infinite noise would beat every logit: one vocabulary in a hundred has such a token."""
    noise = gumbel_noise(torch.tensor([36]), torch.tensor([0]), torch.tensor([1_079_102]))
    assert noise.item() == pytest.approx(-2.8115, abs=1e-3)


def test_noise_is_gumbel_and_its_rows_are_independent() -> None:
    noise = gumbel_noise(torch.arange(64), torch.arange(64) // 8, torch.arange(4096))
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.std().item() == pytest.approx(1.2825, abs=0.01)
    correlations = torch.corrcoef(noise) - torch.eye(64)
    assert correlations.abs().max() < 0.1  # 4096 samples: standard error 0.016
    assert torch.corrcoef(noise.T[:64]).fill_diagonal_(0).abs().max() < 0.6
