"""A device's queue of work, as steps use it: work is begun here and its result is waited for later.

The host runs ahead of the device by a step. So memory that a step's work reads on the host is not
written again before that step is done: it comes from a ring with a slot for each step that may be
in flight, and one to fill.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
"""By name; there may be none."""

Work = Callable[[], Tensors]
"""Enqueues what a device is to do, without waiting for it; returns what the host is to have."""


class Pending(Protocol):
    """Work that was begun."""

    def is_done(self) -> bool:
        """Whether `wait` would not wait."""
        ...

    def wait(self) -> Tensors:
        """Wait until the device is done; the result, on the host."""
        ...


class Stream(ABC):
    """Runs work in the order in which it was given.

    Args:
        depth: how many steps may be in flight at most.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._slots = [self.allocate(0) for _ in range(depth + 1)]
        self._readers: list[Pending | None] = [None] * len(self._slots)
        self._current = 0

    def stage(self, num_bytes: int) -> Tensor:
        """Memory on the host that the next work may read, uint8 [num_bytes]."""
        self._current = (self._current + 1) % len(self._slots)
        reader = self._readers[self._current]
        if reader is not None:
            reader.wait()
        if len(self._slots[self._current]) < num_bytes:
            self._slots[self._current] = self.allocate(num_bytes * 5 // 4)
        return self._slots[self._current][:num_bytes]

    def run(self, work: Work) -> Pending:
        """Begin work, which may read what `stage` gave last."""
        pending = self.enqueue(work)
        self._readers[self._current] = pending
        return pending

    def allocate(self, num_bytes: int) -> Tensor:
        """Memory on the host, uint8, that the device can copy from while the host goes on."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    @abstractmethod
    def join(self) -> None:
        """Have work that is begun from now on wait for what this thread gave the device before."""

    @abstractmethod
    def enqueue(self, work: Work) -> Pending:
        """Begin work."""
