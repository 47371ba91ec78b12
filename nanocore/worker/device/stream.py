"""A device's queue of work, as steps use it: work is begun here and its result is waited for later.

The host runs ahead of the device by a step. So memory that a step's work reads on the host is not
written again before that step is done: it comes from a ring with a buffer for each step that may be
in flight, and one to fill. What a step is told when it was begun already has a ring of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
"""By name; there may be none."""

_NUM_PHASES: Final = 2

Work = Callable[[], Tensors]
"""Enqueues what a device is to do, without waiting for it; returns what the host is to have."""


class Pending(Protocol):
    """Work that was begun and whose result may be on its way."""

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> Tensors:
        """Wait until the device is done; the result, on the host."""
        ...


@dataclass(slots=True)
class StagingBuffer:
    """One of the ring. memory: on the host, uint8. reader: work that may read it.

    scratch: what its writer made of this memory, for it to find when the buffer comes round again;
    gone with the memory when the buffer grows.
    """

    memory: Tensor
    reader: Pending | None = None
    scratch: dict[Hashable, Any] = field(default_factory=dict)


class Stream(ABC):
    """Runs work in the order in which it was given. staged: what `stage` gave last.

    Args:
        depth: how many steps may be in flight at most.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._rings = [
            deque(StagingBuffer(self.allocate(0)) for _ in range(depth + 1))
            for _ in range(_NUM_PHASES)
        ]
        self.staged = self._rings[0][-1]

    def stage(self, num_bytes: int, phase: int = 0) -> StagingBuffer:
        """Memory of at least num_bytes on the host, that the next work may read.

        phase: 1 for work that is given behind a step's first, to which it belongs.
        """
        ring = self._rings[phase]
        buffer = ring[0]
        ring.rotate(-1)
        if buffer.reader is not None:
            buffer.reader.wait()
        if len(buffer.memory) < num_bytes:
            buffer.memory = self.allocate(num_bytes * 5 // 4)
            buffer.scratch.clear()
        self.staged = buffer
        return buffer

    def run(self, work: Work) -> Pending:
        """Begin work, which may read what `stage` gave last."""
        self.staged.reader = pending = self.enqueue(work)
        return pending

    def allocate(self, num_bytes: int) -> Tensor:
        """Memory on the host, uint8, that the device can copy from while the host goes on."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    @abstractmethod
    def join(self) -> None:
        """Have work that is begun from now on wait for what this thread gave the device before."""

    @abstractmethod
    def enqueue(self, work: Work) -> Pending:
        """Begin work behind all that was begun before, and do not wait for it."""
