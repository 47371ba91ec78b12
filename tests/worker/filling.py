"""Fills parameters from memory, as a loader does from files."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from nanocore.worker.loading.weights import Entries, PendingOwners


def fill(entries: Entries, stored: Mapping[str, Tensor]) -> None:
    """Give every part its slice of these tensors, and tell owners."""
    unfilled = PendingOwners(part.owner for entry in entries.values() for part in entry.parts)
    for name, entry in entries.items():
        tensor = stored[name]
        assert tuple(tensor.shape) == entry.shape, name
        assert entry.dtype in (None, tensor.dtype), name
        for part in entry.parts:
            part.memory().copy_(tensor[part.index])
            unfilled.count_filled(part.owner)


def fill_with(value: float) -> Callable[[Entries], None]:

    def filling(entries: Entries) -> None:
        fill(entries, {name: torch.full(entry.shape, value) for name, entry in entries.items()})

    return filling
