"""Random weights: the same model whatever a rank keeps of it, and of sensible size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanocore.worker.loading import dummy_weights
from nanocore.worker.loading.dummy_weights import fill_dummy_weights
from nanocore.worker.loading.weights import Index, LoadedSlice, TensorEntry, whole


def filled(name: str, *shape: int, index: Index = (), seed: int = 0) -> Tensor:
    target = torch.empty(shape, device="meta")[index]
    target = torch.full(target.shape, torch.nan)
    fill_dummy_weights({name: TensorEntry(shape, [LoadedSlice(target, index)])}, seed)
    assert not target.isnan().any()
    return target


@pytest.fixture(params=["host", "device"], autouse=True)
def _drawing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "device":
        monkeypatch.setattr(dummy_weights, "draw_on_host", dummy_weights.draw_on_device)


def set_block_numel(monkeypatch: pytest.MonkeyPatch, numel: int) -> None:
    monkeypatch.setattr(dummy_weights, "BLOCK_NUMEL", {dummy_weights.draw_on_host: numel})


@pytest.mark.parametrize("block_numel", [1, 8, 100, 2**18])
@pytest.mark.parametrize(
    "index",
    [(slice(3, 9),), (slice(0, 10), slice(2, 5)), (slice(1, 2), slice(0, 6), slice(3, 4)),
     (slice(4, 4),)],
)  # fmt: skip
def test_a_slice_is_that_of_the_whole_tensor(
    monkeypatch: pytest.MonkeyPatch, index: Index, block_numel: int
) -> None:
    set_block_numel(monkeypatch, block_numel)
    assert torch.equal(filled("a", 10, 6, 4, index=index), filled("a", 10, 6, 4)[index])


def test_values_are_scaled_by_what_they_are_for() -> None:
    matrix = filled("a.weight", 500, 400)
    assert matrix.std().item() == pytest.approx(400**-0.5, rel=0.01)
    assert abs(matrix.mean().item()) < 1e-3
    norm = filled("norm.weight", 4000)
    assert norm.mean().item() == pytest.approx(1, abs=0.01)
    assert norm.std().item() == pytest.approx(0.1, rel=0.05)
    for bias in (filled("a.bias", 4000), filled("experts.down_proj_bias", 8, 500)):
        assert bias.std().item() == pytest.approx(0.02, rel=0.05)
        assert abs(bias.mean().item()) < 2e-3
    assert 0.8 < filled("scale").item() < 1.2


def test_a_norm_that_is_stored_less_one_is_near_one_too() -> None:
    target = torch.empty(1000)
    fill_dummy_weights({"norm.weight": whole(target, offset=1.0)})
    assert torch.equal(target, filled("norm.weight", 1000))


def test_names_blocks_and_seeds_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    set_block_numel(monkeypatch, 40)
    first = filled("a", 20, 4)
    assert torch.equal(first, filled("a", 20, 4))
    assert not torch.equal(first, filled("b", 20, 4))
    assert not torch.equal(first, filled("a", 20, 4, seed=1))
    assert not torch.equal(first[:10], first[10:])
