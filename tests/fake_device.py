"""A device beside the host that is none: what it is given runs when the test says so.

Work is kept until it is asked for, so a host that needed a result to go on would find stale memory;
and memory that work reads is compared, when it runs, with what it was when the work was given.
Graphs repeat what was recorded, at the addresses and with the host's values of that time.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanocore.worker.step.step_memory import StepLayout
from nanocore.worker.step.stream import GraphCapture, Pending, Staged, Stream, Tensors, Work


@dataclass
class FakePending:
    """Implements `stream.Pending`. work: None once it is done, for it may hold a graph."""

    stream: FakeStream
    work: Work | None
    step: int
    staged: Tensor
    snapshot: Tensor
    result: Tensors = field(default_factory=dict)
    done: bool = False

    def is_done(self) -> bool:
        return self.done

    def wait(self) -> Tensors:
        while not self.done:
            self.stream.finish_one()
        return self.result


class FakeStream(Stream):
    """Runs work, in order, when it is waited for, or when `finish_one` is called.

    step: counts what is staged for the first phase of one.
    """

    def __init__(self, depth: int, graph_capture: GraphCapture | None = None) -> None:
        super().__init__(depth, graph_capture)
        self.queue: deque[FakePending] = deque()
        self.step = 0
        self.longest = 0
        """Steps that were in flight at once, at most."""

    def join(self) -> None:
        """There is nothing but this queue."""

    def stage(self, layout: StepLayout, phase: int = 0) -> Staged:
        if phase == 0:
            self.step += 1
        return super().stage(layout, phase)

    def enqueue(self, work: Work) -> Pending:
        staged = self.filled.memory
        pending = FakePending(self, work, self.step, staged, staged.clone())
        self.queue.append(pending)
        num_steps = len({pending.step for pending in self.queue})
        self.longest = max(self.longest, num_steps)
        assert num_steps <= self.depth, "more steps in flight than there may be"
        return pending

    @torch.inference_mode()
    def finish_one(self) -> None:
        """Run the oldest work."""
        pending = self.queue.popleft()
        unchanged = torch.equal(pending.staged[: len(pending.snapshot)], pending.snapshot)
        assert unchanged, "memory was written that a step in flight reads"
        assert pending.work is not None
        result, pending.work = pending.work(), None
        pending.result = {name: tensor.clone() for name, tensor in result.items()}
        pending.done = True


class FakeGraphPools:
    """The pools of a device's graphs, counted as torch counts them.

    A pool whose graphs are all gone can have no more: torch's allocator asserts it.
    """

    def __init__(self) -> None:
        self.num_graphs: dict[int, int] = {}
        self._num_handles = 0

    def new_handle(self) -> int:
        self._num_handles += 1
        return self._num_handles

    def enter(self, handle: int, graph: object) -> None:
        """A graph begins to be recorded; it leaves when nothing refers to it any more."""
        assert self.num_graphs.get(handle) != 0, "use_count > 0: this pool's graphs are all gone"
        self.num_graphs[handle] = self.num_graphs.get(handle, 0) + 1
        weakref.finalize(graph, self._leave, handle)

    def _leave(self, handle: int) -> None:
        self.num_graphs[handle] -= 1


@dataclass
class FakeGraphRecorder:
    """Implements `stream.GraphCapture` on CPU tensors.

    A replay computes with the host's values of the recording, and leaves what it computes where the
    recording left it. num_records, num_replays: so far.
    """

    num_records: int = 0
    num_replays: int = 0
    pools: FakeGraphPools = field(default_factory=FakeGraphPools)
    pool: int | None = None

    def begin_set(self) -> None:
        self.pool = self.pools.new_handle()

    def capture(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        self.num_records += 1
        work()
        assert self.pool is not None, "no set was begun"
        result = work()

        def replay() -> None:
            self.num_replays += 1
            result.copy_(work())

        self.pools.enter(self.pool, replay)
        return result, replay
