"""A rank's loop and its pipe: messages, steps in flight, and ends."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from nanocore.worker.__main__ import serve
from nanocore.worker.executors.pipe import Pipe, encode_frame
from nanocore.worker.executors.status_board import StatusBoard
from nanocore.worker.memory.kv_groups import CacheKind, KVGroup, LayerGroup
from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput, TokenMasks
from nanocore.worker.rank_messages import (
    AllocateCache,
    Done,
    FromRank,
    Profile,
    RankFailure,
    ToRank,
    WorkerInfo,
)
from nanocore.worker.step.pending_output import PendingOutput
from tests.step_plans import make_plan


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
        self.engine.send(make_plan(step=step, num_tokens=1, awaits_masks=awaits_masks))

    def sample(self, step: int) -> None:
        self.engine.send(TokenMasks(step=step, rows=b"", words=b""))

    def result(self) -> int:
        message = self.engine.recv()
        assert isinstance(message, ModelRunnerOutput)
        return message.rows[0]


@pytest.fixture
def rank() -> Iterator[Rank]:
    ours, theirs = socket.socketpair()
    fd = StatusBoard.create(1)
    pipe, worker, board = LookingPipe(theirs, ToRank), FakeWorker(), StatusBoard(fd, 1)
    errors: list[BaseException] = []

    def run() -> None:
        fake: Any = worker
        try:
            serve(pipe, fake, board, 0, reports=True)
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


Pipes = tuple[Pipe[FromRank], Pipe[ToRank]]


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    engine_end, rank_end = socket.socketpair()
    with engine_end, rank_end:
        yield Pipe(engine_end, FromRank), Pipe(rank_end, ToRank)


def large_plan(num_bytes: int = 8) -> SchedulerOutput:
    return make_plan(step=3, block_rows=bytes(num_bytes))


def test_messages_arrive_as_they_were_sent_and_in_order(pipes: Pipes) -> None:
    engine, rank = pipes
    orders = (
        Profile(),
        AllocateCache(
            num_slabs=5,
            max_model_len=9,
            groups=[KVGroup(CacheKind(), 4), KVGroup(CacheKind(window=8), 20, 5)],
        ),
        large_plan(),
    )
    for message in orders:
        engine.send(message)
    assert tuple(rank.recv() for _ in orders) == orders
    answers = (
        Done(),
        ModelRunnerOutput(rows=b"\0\0\0\0", token_ids=b"\1\0\0\0"),
        RankFailure(exit_code=4, message="no more", traceback="line\n"),
        WorkerInfo(
            device="cpu", dtype="float32", kernels="torch", weight_bytes=1,
            kv_groups=[LayerGroup(CacheKind(), 1, 2)], available_kv_bytes=3, memory_bytes=4,
        ),
    )  # fmt: skip
    for answer in answers:
        rank.send(answer)
    assert tuple(engine.recv() for _ in answers) == answers


def test_a_message_larger_than_the_sockets_buffer_arrives_whole(pipes: Pipes) -> None:
    engine, rank = pipes
    sender = threading.Thread(target=engine.send, args=(large_plan(5_000_000),))
    sender.start()
    message = rank.recv()
    sender.join()
    assert message == large_plan(5_000_000)


@pytest.mark.parametrize("sent", [b"", encode_frame(large_plan())[:-1]])
def test_a_closed_end_is_the_end_of_file_even_within_a_message(pipes: Pipes, sent: bytes) -> None:
    engine, rank = pipes
    engine.send_some(memoryview(sent))
    engine.close()
    with pytest.raises(EOFError):
        rank.recv()


def test_sending_to_a_closed_end_is_an_error(pipes: Pipes) -> None:
    engine, rank = pipes
    rank.close()
    with pytest.raises(OSError, match="Broken pipe"):
        engine.send(large_plan())
