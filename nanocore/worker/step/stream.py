"""Queues of work: a step is begun here and its result is waited for later.

A device beside the host runs a step behind the host. So memory that a step's work reads on the host
is not written again before that step is done: it comes from a ring with a buffer for each step that
may be in flight, and one to fill. The second phase of a step has a ring of its own. On the host
itself work runs at once, and reads the columns where they were written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, Protocol, TypeVar

import msgspec
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanocore.worker.step.step_memory import Fields, StepLayout

Tensors = Mapping[str, Tensor]
"""By name; there may be none."""

Work = Callable[[], Tensors]
"""Enqueues what a device is to do, without waiting for it; returns what the host is to have."""

_NUM_PHASES: Final = 2
_MAX_LAYOUTS: Final = 64
"""Layouts of a buffer whose views are kept: a steady step finds its own."""


R = TypeVar("R")


class GraphCapture(Protocol):
    """Captures work that a device is to repeat."""

    def begin_set(self) -> None:
        """Graphs to come share memory with each other and with none before, which are gone."""
        ...

    def capture(self, work: Callable[[], R]) -> tuple[R, Callable[[], None]]:
        """Run work, perhaps several times.

        Returns its result, and what repeats it: with the same inputs and result (float32, if it is
        a tensor) in memory, and without the host.
        """
        ...


class Pending(Protocol):
    """Work that was begun and whose result may be on its way."""

    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> Tensors:
        """Wait until the work is done; the result, on the host."""
        ...


class DoneWork(msgspec.Struct, frozen=True):
    """Implements `Pending` for work that is done."""

    result: Tensors = {}

    def is_done(self) -> bool:
        return True

    def wait(self) -> Tensors:
        return self.result


class Staged(msgspec.Struct, frozen=True):
    """Columns for a step's work. memory: uint8 on the host, with these fields.

    columns: the same, to be written. held: what was written there.
    """

    layout: StepLayout
    memory: Tensor
    fields: Fields
    columns: dict[str, NDArray]
    held: dict[str, NDArray]

    @classmethod
    def of(cls, layout: StepLayout, memory: Tensor) -> Staged:
        """Columns in uint8 memory of at least the layout's num_bytes."""
        memory = memory[: layout.num_bytes]
        fields = Fields(layout, memory)
        columns = {name: fields[name].numpy() for name in layout.places}
        return cls(layout, memory, fields, columns, {})

    def write(self, values: Mapping[str, NDArray], spare_row: int = 0) -> None:
        """Write values, which nobody changes later; what is left of a column becomes padding.

        A column that is there already is not written again: most of a steady step's are.
        """
        columns, held = self.columns, self.held
        for name, values_of in values.items():
            if held.get(name) is values_of:
                continue
            held[name], to, length = values_of, columns[name], len(values_of)
            to[:length] = values_of
            if length < len(to):
                padding = self.layout.padding[name]
                to[length:] = spare_row if padding is None else padding

    def to(self, device: torch.device | None) -> tuple[Tensor, Fields]:
        """(a copy of the memory, its fields) on a device beside the host; None: the host's own."""
        if device is None:
            return self.memory, self.fields
        memory = self.memory.to(device, non_blocking=True, copy=True)
        return memory, Fields(self.layout, memory)


class StagingBuffer(msgspec.Struct):
    """One of the ring. memory: on the host, uint8. reader: work that may read it.

    kept: views of this memory, gone with it when the buffer grows. last: the one that is in use.
    """

    memory: Tensor
    reader: Pending | None = None
    kept: dict[StepLayout, Staged] = {}
    last: Staged | None = None

    def staged(self, layout: StepLayout) -> Staged:
        """Columns of this layout, with whatever was written there before."""
        staged = self.kept.get(layout)
        if staged is None:
            if len(self.kept) == _MAX_LAYOUTS:
                self.kept.clear()
            staged = self.kept[layout] = Staged.of(layout, self.memory)
        if staged is not self.last:  # which lies in the same memory
            staged.held.clear()
            self.last = staged
        return staged


class Stream(ABC):
    """Runs work in the order in which it was given. filled: the buffer that `stage` gave last.

    Args:
        depth: how many steps may be in flight at most.
        graph_capture: captures steps; None: they run kernel by kernel.

    is_host: work reads and writes the host's own memory.
    """

    is_host: bool = False

    def __init__(self, depth: int, graph_capture: GraphCapture | None = None) -> None:
        self.depth = depth
        self.graph_capture = graph_capture
        self._rings = [
            deque(StagingBuffer(self.allocate(0)) for _ in range(depth + 1))
            for _ in range(_NUM_PHASES)
        ]
        self.filled = self._rings[0][-1]

    def stage(self, layout: StepLayout, phase: int = 0) -> Staged:
        """Columns on the host, to be written now and read by the next work.

        phase: 1 for work that is given behind a step's first, to which it belongs.
        """
        ring = self._rings[phase]
        buffer = ring[0]
        ring.rotate(-1)
        if buffer.reader is not None:
            buffer.reader.wait()
        if buffer.memory.numel() < layout.num_bytes:
            buffer.memory = self.allocate(layout.num_bytes * 5 // 4)
            buffer.kept.clear()
        self.filled = buffer
        return buffer.staged(layout)

    def run(self, work: Work) -> Pending:
        """Begin work, which may read what `stage` gave last."""
        self.filled.reader = pending = self.enqueue(work)
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


class HostStream(Stream):
    """Implements `Stream` where the host computes: work is done when `run` returns."""

    is_host = True

    def __init__(self) -> None:
        super().__init__(depth=1)

    def join(self) -> None:
        """The host has done all it was given."""

    def enqueue(self, work: Work) -> Pending:
        return DoneWork(work())
