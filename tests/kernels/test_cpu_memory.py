"""Memory of packed weights: small ones share pieces, and freed memory goes back between them."""

from __future__ import annotations

import pytest

from nanocore.kernels.cpu import linear
from nanocore.kernels.cpu.linear import WeightMemory

MIB = 1 << 20


def test_small_weights_share_a_piece_and_do_not_overlap() -> None:
    weights = WeightMemory()
    taken = [weights.take(3 * MIB + 5) for _ in range(8)]
    for i, piece in enumerate(taken):
        piece.fill_(i)
    assert all((piece == i).all() for i, piece in enumerate(taken))
    assert all(piece.data_ptr() % 64 == 0 for piece in taken)
    assert len({piece.untyped_storage().data_ptr() for piece in taken}) == 1


def test_before_a_new_piece_is_begun_freed_memory_goes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trimmed: list[int] = []
    monkeypatch.setattr(linear, "_trim", trimmed.append)
    weights = WeightMemory()
    for _ in range(12):  # of 10 MiB each, of which six fit a piece
        weights.take(10 * MIB)
    assert len(trimmed) == 2
    weights.take(17 * MIB)
    assert len(trimmed) == 3
