"""Plans and results that are larger than what a rank's socket holds; the ranks are threads."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from nanocore.protocol.errors import WorkerError
from nanocore.worker.__main__ import serve
from nanocore.worker.executors import process_executor
from nanocore.worker.executors.pipe import Pipe
from nanocore.worker.executors.process_executor import ProcessExecutor
from nanocore.worker.executors.status_board import StatusBoard
from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput, TokenMasks
from nanocore.worker.rank_messages import Done, FromRank, RankStart, ToRank
from nanocore.worker.step.pending_output import PendingOutput
from tests.step_plans import make_plan
from tests.worker.configs import make_worker_config

LARGE = 4 << 20
"""Bytes: some of what a socket between processes holds."""
NUM_STEPS = 4


@dataclass
class Exchange:
    """Rank 1 begins a step when rank 0 has, as if they reduced."""

    begun: list[threading.Event] = field(
        default_factory=lambda: [threading.Event() for _ in range(NUM_STEPS)]
    )


@dataclass
class LargeResult:
    """Implements `PendingOutput`: done at once."""

    step: int
    awaits_masks: bool = False

    def sample(self, masks: TokenMasks) -> None:
        raise AssertionError("no step awaits masks")

    def is_done(self) -> bool:
        return True

    def wait(self) -> ModelRunnerOutput:
        return ModelRunnerOutput(rows=bytes([self.step]), token_ids=bytes(LARGE))


@dataclass
class FakeWorker:
    """Of one rank."""

    rank: int
    exchange: Exchange

    def begin(self, plan: SchedulerOutput) -> PendingOutput:
        if self.rank == 0:
            self.exchange.begun[plan.step].set()
        else:
            self.exchange.begun[plan.step].wait(60)
        return LargeResult(plan.step)


class ThreadRank:
    """What the executor knows of a `RankProcess`; `rank` 0 answers.

    dies_with: the step at whose plan the rank closes its pipe, having read nothing of it.
    """

    exchange: ClassVar = Exchange()
    dies_with: ClassVar[dict[int, int]] = {}

    def __init__(self, start: RankStart) -> None:
        self.rank, self.name = start.rank, f"rank {start.rank}"
        ours, theirs = socket.socketpair()
        self.pipe: Pipe[FromRank] = Pipe(ours, FromRank)
        self._pipe: Pipe[ToRank] = Pipe(theirs, ToRank)
        self._board = StatusBoard(start.board_fd, start.config.num_ranks)
        self.pidfd = os.pidfd_open(os.getpid())
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self._pipe.send(Done())
        if self.rank in self.dies_with:
            self._pipe.has_message(60)
            self._pipe.close()
            return
        worker: Any = FakeWorker(self.rank, self.exchange)
        with pytest.raises(EOFError):
            serve(self._pipe, worker, self._board, self.rank, reports=self.rank == 0)

    def death(self) -> WorkerError:
        return WorkerError(f"{self.name} is gone")

    def end(self) -> None:
        self._thread.join(60)
        self._pipe.close()
        os.close(self.pidfd)


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessExecutor]:
    monkeypatch.setattr(process_executor, "RankProcess", ThreadRank)
    monkeypatch.setattr(ThreadRank, "exchange", Exchange())
    found = ProcessExecutor(make_worker_config(tensor_parallel_size=2), hidden_size=8)
    yield found
    found.close()


def large_plan(step: int) -> SchedulerOutput:
    return make_plan(step=step, block_rows=bytes(LARGE), num_tokens=1)


def test_large_plans_pass_large_results_by(executor: ProcessExecutor) -> None:
    """Rank 0 sends the result of a step, rank 1 waits for it, and the engine has the next plan."""
    executor.load_model()
    for step in range(NUM_STEPS):
        executor.submit(large_plan(step))
    results = [executor.collect() for _ in range(NUM_STEPS)]
    assert [result.rows[0] for result in results] == list(range(NUM_STEPS))
    assert all(len(result.token_ids) == LARGE for result in results)


def test_a_rank_that_dies_while_a_plan_waits_for_room_is_named(
    executor: ProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ThreadRank, "dies_with", {1: 0})
    executor.load_model()
    with pytest.raises(WorkerError, match="rank 1 is gone"):
        executor.submit(large_plan(0))
