"""The pipe between an engine and a rank: framing, types, and the end of either side."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from nanocore.worker.executors.pipe import Pipe, encode_frame
from nanocore.worker.plan import ModelRunnerOutput, SchedulerOutput
from nanocore.worker.rank_messages import (
    AllocateCache,
    Capture,
    Done,
    FromRank,
    Profile,
    RankFailure,
    RunStep,
    StepResult,
    ToRank,
    WorkerInfo,
)

Pipes = tuple[Pipe[FromRank], Pipe[ToRank]]


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    engine_end, rank_end = socket.socketpair()
    with engine_end, rank_end:
        yield Pipe(engine_end, FromRank), Pipe(rank_end, ToRank)


def make_plan(num_bytes: int = 8) -> SchedulerOutput:
    return SchedulerOutput(
        step=3,
        removed_rows=b"",
        added=[],
        block_rows=bytes(num_bytes),
        block_ids=b"",
        chunk_rows=b"",
        chunk_counts=b"",
        num_tokens=0,
    )


def test_messages_arrive_as_they_were_sent_and_in_order(pipes: Pipes) -> None:
    engine, rank = pipes
    orders = (
        Profile(),
        AllocateCache(num_blocks=5, max_model_len=9),
        Capture(),
        RunStep(make_plan()),
    )
    for message in orders:
        engine.send(message)
    assert tuple(rank.recv() for _ in orders) == orders
    answers = (
        Done(),
        StepResult(ModelRunnerOutput(rows=b"\0\0\0\0", token_ids=b"\1\0\0\0")),
        RankFailure(kind="memory", message="no more", traceback="line\n"),
        WorkerInfo(
            device="cpu", dtype="float32", kernels="torch", weight_bytes=1, kv_block_bytes=2,
            available_kv_bytes=3, memory_bytes=4,
        ),
    )  # fmt: skip
    for answer in answers:
        rank.send(answer)
    assert tuple(engine.recv() for _ in answers) == answers


def test_a_message_larger_than_the_sockets_buffer_arrives_whole(pipes: Pipes) -> None:
    engine, rank = pipes
    sender = threading.Thread(target=engine.send, args=(RunStep(make_plan(5_000_000)),))
    sender.start()
    message = rank.recv()
    sender.join()
    assert message == RunStep(make_plan(5_000_000))


@pytest.mark.parametrize("sent", [b"", encode_frame(RunStep(make_plan()))[:-1]])
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
        engine.send(RunStep(make_plan()))
