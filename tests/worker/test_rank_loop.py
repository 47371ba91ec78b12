"""What a rank does with what comes through its pipe; the worker is a fake one."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from nanocore.worker.__main__ import serve
from nanocore.worker.executors.pipe import Pipe
from nanocore.worker.executors.status_board import StatusBoard
from nanocore.worker.pending_output import PendingOutput
from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput, TokenMasks
from nanocore.worker.rank_messages import FromRank, RunStep, SampleStep, StepResult, ToRank


@dataclass
class FakePending:
    """Implements `PendingOutput`. Of a step that awaits masks, or that a device does."""

    output: ModelRunnerOutput
    awaits_masks: bool
    done: bool = False

    def sample(self, masks: TokenMasks) -> None:
        assert self.awaits_masks
        self.awaits_masks, self.done = False, True

    def is_done(self) -> bool:
        return self.done

    def wait(self) -> ModelRunnerOutput:
        assert self.done
        return self.output


@dataclass
class FakeWorker:
    """awaits: a step does that was begun."""

    steps: list[FakePending] = field(default_factory=list)
    awaits: threading.Event = field(default_factory=threading.Event)

    def begin(self, plan: SchedulerOutput) -> PendingOutput:
        output = ModelRunnerOutput(rows=bytes([plan.step]), token_ids=b"")
        self.steps.append(FakePending(output, plan.awaits_masks))
        if plan.awaits_masks:
            self.awaits.set()
        return self.steps[-1]


class LookingPipe(Pipe[ToRank]):
    """Counts how often it is looked at."""

    num_looks = 0

    def has_message(self, timeout_s: float) -> bool:
        self.num_looks += 1
        return super().has_message(timeout_s)


@dataclass
class Rank:
    """engine: the other end of the pipe."""

    worker: FakeWorker
    pipe: LookingPipe
    board: StatusBoard
    engine: Pipe[FromRank]

    def begin(self, step: int, awaits_masks: bool) -> None:
        plan = SchedulerOutput(
            step=step, removed_rows=b"", added=[], block_rows=b"", block_ids=b"", chunk_rows=b"",
            chunk_counts=b"", num_tokens=1, awaits_masks=awaits_masks,
        )  # fmt: skip
        self.engine.send(RunStep(plan))

    def sample(self, step: int) -> None:
        self.engine.send(SampleStep(TokenMasks(step=step, rows=b"", words=b"")))

    def result(self) -> int:
        message = self.engine.recv()
        assert isinstance(message, StepResult)
        return message.output.rows[0]


@pytest.fixture
def rank() -> Iterator[Rank]:
    ours, theirs = socket.socketpair()
    fd = StatusBoard.create(1)
    pipe, worker, board = LookingPipe(theirs, ToRank), FakeWorker(), StatusBoard(fd, 1)
    errors: list[BaseException] = []

    def run() -> None:
        fake: Any = worker
        try:
            serve(pipe, fake, board, 0, answers=True)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    engine: Pipe[FromRank] = Pipe(ours, FromRank)
    yield Rank(worker, pipe, board, engine)
    engine.close()
    thread.join(60)
    os.close(fd)
    pipe.close()
    assert [type(error) for error in errors] == [EOFError]


def test_a_step_that_awaits_masks_is_answered_when_they_came_and_nobody_looks_for_it(
    rank: Rank,
) -> None:
    for step in (1, 2, 3):
        rank.begin(step, awaits_masks=True)
        rank.sample(step)
        assert rank.result() == step
    assert rank.pipe.num_looks == 0
    assert rank.board.behind(3) == []


def test_a_step_in_flight_is_answered_while_the_next_one_awaits_masks(rank: Rank) -> None:
    rank.begin(1, awaits_masks=False)
    rank.begin(2, awaits_masks=True)
    assert rank.worker.awaits.wait(60)
    rank.worker.steps[0].done = True
    assert rank.result() == 1
    assert rank.board.behind(2) == [(0, 2)]
    rank.sample(2)
    assert rank.result() == 2
    assert rank.board.behind(2) == []
