"""The io thread with a scripted socket: slow clients, vanished ones, and those that fall silent."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from queue import SimpleQueue
from typing import get_args

import msgspec
import numpy as np
import pytest

from nanocore.engine_core import io_thread as module
from nanocore.engine_core.admission import Admission
from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.io_thread import IoThread
from nanocore.engine_core.mailbox import (
    AbortRequests,
    AddRequest,
    ControlCall,
    Farewell,
    Inbox,
    Outbox,
)
from nanocore.engine_core.model_files import ModelFiles
from nanocore.engine_core.outputs import ClientOutput
from nanocore.engine_core.queue_limit import QueueLimit
from nanocore.engine_core.scheduler import SchedulerCounters
from nanocore.protocol.codec import client_decoder, encode
from nanocore.protocol.messages import (
    MAX_FILE_CHUNK_BYTES,
    Accepted,
    Bye,
    Control,
    ControlOperation,
    Error,
    Event,
    Hello,
    Message,
    ModelCard,
    Output,
    Ping,
    Reply,
    Submit,
    Welcome,
)
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.protocol.sockets import SendResult

TOKENIZER = bytes(range(256)) * 300  # more than a chunk
CARD = ModelCard(
    model="fake",
    architecture="Fake",
    dtype="float32",
    vocab_size=50,
    max_model_len=64,
    eos_token_ids=[],
    block_size=4,
    num_blocks=16,
)


class FakeSocket:
    """An EngineSocket whose sends are answered as `state` says; what was sent is in `sent`."""

    def __init__(self) -> None:
        self.incoming: deque[tuple[bytes, list[bytes]]] = deque()
        self.sent: list[tuple[bytes, Message]] = []
        self.state: dict[bytes, SendResult] = {}

    def watch(self, fd: int) -> None: ...

    def wait(self, timeout_ms: int) -> set[int]:
        return set()

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        return self.incoming.popleft() if self.incoming else None

    def send(self, routing_id: bytes, frames: list[bytes]) -> SendResult:
        result = self.state.get(routing_id, SendResult.SENT)
        if result is SendResult.SENT:
            self.sent.append((routing_id, client_decoder().decode(frames)))
        return result

    def close(self) -> None: ...


class Io:
    """An io thread driven by hand, one client "a" already in session."""

    def __init__(self, folder: Path) -> None:
        self.socket = FakeSocket()
        self.inbox: Inbox = SimpleQueue()
        self.outbox = Outbox()
        queue_limit = QueueLimit(8, 10_000, SchedulerCounters())
        self.thread = IoThread(
            self.socket,  # type: ignore[arg-type]
            self.inbox,
            self.outbox,
            model=CARD,
            files=ModelFiles(folder),
            capabilities=["prefix_caching"],
            max_num_seqs=4,
            instance="0" * 32,
            queue_limit=queue_limit,
            admission=Admission(CARD, EngineConfig(), queue_limit),
            num_steps=lambda: 0,
        )
        self.receive(Hello(protocol=(1, 0)))
        assert isinstance(self.take_sent()[0], Welcome)
        self.session = self.thread._sessions[b"a"]

    def receive(self, message: Message) -> None:
        self.thread._receive(b"a", encode(message))

    def submit(self, request_id: str) -> int:
        """Submit a request; returns its handle."""
        self.receive(Submit(request_id=request_id, prompt_token_ids=b"\1\0\0\0"))
        event = self.inbox.get_nowait()
        assert isinstance(event, AddRequest)
        return event.request.handle

    def step(self, *tokens: tuple[int, int], finish: tuple[int, ...] = ()) -> None:
        """Deliver a step's output of (handle, token) pairs."""
        handles, ids = zip(*tokens, strict=True) if tokens else ((), ())
        events = [Event(handle=handle, finish_reason="length") for handle in finish]
        self.thread._deliver(
            ClientOutput(1, np.array(handles, np.uint32), np.array(ids, np.int32), events)
        )

    def take_sent(self) -> list[Message]:
        messages = [message for _, message in self.socket.sent]
        self.socket.sent.clear()
        return messages


@pytest.fixture
def io(tmp_path: Path) -> Io:
    (tmp_path / "tokenizer.json").write_bytes(TOKENIZER)
    (tmp_path / "config.json").write_text("{}")
    return Io(tmp_path)


def columns(output: Message) -> tuple[list[int], list[int], list[int] | None]:
    assert isinstance(output, Output)
    counts = None if output.counts is None else np.frombuffer(output.counts, "<u4").tolist()
    handles = np.frombuffer(output.handles, "<u4").tolist()
    return handles, np.frombuffer(output.tokens, "<i4").tolist(), counts


def test_a_step_is_one_message_of_columns(io: Io) -> None:
    first, second = io.submit("x"), io.submit("y")
    assert [type(message) for message in io.take_sent()] == [Accepted, Accepted]
    io.step((first, 10), (second, 20), finish=(second,))
    (output,) = io.take_sent()
    assert columns(output) == ([first, second], [10, 20], None)


def test_a_slow_client_gets_its_tokens_merged_and_in_order(io: Io) -> None:
    first = io.submit("x")
    io.take_sent()
    io.socket.state[b"a"] = SendResult.FULL
    io.step((first, 1))
    second = io.submit("y")  # its ACCEPTED waits, too
    io.step((first, 2), (second, 7))
    io.step((first, 3), finish=(first,))
    io.thread._flush(io.session, now_s=0.0)
    assert io.take_sent() == []
    io.socket.state.clear()
    io.thread._flush(io.session, now_s=0.0)
    accepted, output = io.take_sent()
    assert isinstance(accepted, Accepted)
    assert columns(output) == ([first, second], [1, 2, 3, 7], [3, 1])
    assert output.events == [Event(handle=first, finish_reason="length")]  # type: ignore[attr-defined]
    io.step((second, 8))
    assert columns(io.take_sent()[0]) == ([second], [8], None)
    assert io.thread._slow == {}


def test_a_client_that_takes_nothing_for_long_is_cut_off(io: Io) -> None:
    handle = io.submit("x")
    io.socket.state[b"a"] = SendResult.FULL
    io.step((handle, 1))
    assert io.session.backlog is not None
    start_s = io.session.backlog.since_s
    io.thread._flush(io.session, start_s + module.BACKLOG_TIMEOUT_S)
    assert b"a" in io.thread._sessions
    io.thread._flush(io.session, start_s + module.BACKLOG_TIMEOUT_S + 0.1)
    assert io.thread._sessions == io.thread._slow == {}
    assert io.inbox.get_nowait() == AbortRequests([handle])


def test_a_vanished_client_is_noticed_by_the_next_send(io: Io) -> None:
    handles = [io.submit("x"), io.submit("y")]
    io.socket.state[b"a"] = SendResult.GONE
    io.step((handles[0], 1))
    assert io.inbox.get_nowait() == AbortRequests(handles)
    io.step((handles[0], 2))  # the step in flight still delivers: to nobody


def test_a_silent_client_is_pinged_and_then_closed(io: Io) -> None:
    handle = io.submit("x")
    io.take_sent()
    io.thread._check_sessions(io.session.last_seen_s + module.SESSION_TIMEOUT_S)
    assert io.take_sent() == [Ping()]
    io.thread._check_sessions(io.session.last_seen_s + module.SESSION_TIMEOUT_S + 0.1)
    assert io.inbox.get_nowait() == AbortRequests([handle])


def test_bye_aborts_what_is_open(io: Io) -> None:
    open_handle, ended = io.submit("x"), io.submit("y")
    io.step(finish=(ended,))
    io.receive(Bye())
    assert io.inbox.get_nowait() == AbortRequests([open_handle])
    assert io.thread._request_ids == {}


def test_an_ended_requests_id_can_be_used_again(io: Io) -> None:
    first = io.submit("x")
    io.receive(Submit(request_id="x", prompt_token_ids=b"\1\0\0\0"))
    io.step(finish=(first,))
    second = io.submit("x")
    assert second > first
    accepted, refused, _, again = io.take_sent()
    assert isinstance(refused, Error)
    assert refused.code == "duplicate_request_id"
    assert isinstance(accepted, Accepted)
    assert isinstance(again, Accepted)


def test_a_failing_engine_says_so_to_everyone(io: Io) -> None:
    io.thread._say_bye(Farewell("it broke", failure=True))
    error, bye = io.take_sent()
    assert isinstance(error, Error)
    assert (error.code, error.message) == ("engine_dead", "it broke")
    assert bye == Bye(reason="it broke")


def test_a_deaf_io_thread_ends_the_engine(io: Io, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(timeout_ms: int) -> set[int]:
        raise RuntimeError("poll failed")

    monkeypatch.setattr(io.socket, "wait", broken)
    io.thread.run()
    shutdown = io.inbox.get_nowait()
    assert shutdown.failure  # type: ignore[union-attr]
    assert "poll failed" in shutdown.reason  # type: ignore[union-attr]


def test_the_seed_in_use_is_told_and_drawn_from_the_engines(io: Io, tmp_path: Path) -> None:
    io.submit("x")
    io.receive(
        msgspec.structs.replace(
            Submit(request_id="y", prompt_token_ids=b"\1\0\0\0"),
            sampling=EngineSamplingParams(seed=5),
        )
    )
    drawn, given = io.take_sent()
    assert isinstance(drawn, Accepted)
    assert isinstance(given, Accepted)
    assert given.seed == 5
    other = Io(tmp_path)
    other.submit("x")
    assert other.take_sent()[0] == drawn


def test_a_full_queue_is_answered_with_when_to_try_again(io: Io) -> None:
    for i in range(8):
        io.submit(f"r{i}")
    io.take_sent()
    io.receive(Submit(request_id="one too many", prompt_token_ids=b"\1\0\0\0"))
    (error,) = io.take_sent()
    assert isinstance(error, Error)
    assert (error.code, error.request_id) == ("overloaded", "one too many")
    assert error.retry_after_s is not None
    assert io.inbox.empty()
    assert "one too many" not in io.session.requests


@pytest.mark.parametrize("operation", sorted({*get_args(ControlOperation)} - {"read_file"}))
def test_an_operation_of_the_allow_list_reaches_the_step_loop(io: Io, operation: str) -> None:
    io.receive(Control(call_id=7, operation=operation))
    assert io.inbox.get_nowait() == ControlCall(1, 7, operation)  # type: ignore[arg-type]


@pytest.mark.parametrize("operation", ["shutdown", "__class__", "", "STATS"])
def test_any_other_operation_is_answered_and_goes_nowhere(io: Io, operation: str) -> None:
    io.receive(Control(call_id=7, operation=operation))
    (reply,) = io.take_sent()
    assert isinstance(reply, Reply)
    assert (reply.call_id, reply.ok) == (7, False)
    assert repr(operation) in (reply.message or "")
    assert io.inbox.empty()


def read_file(io: Io, name: str | None, offset: int = 0) -> Reply:
    io.receive(Control(call_id=9, operation="read_file", file=name, offset=offset))
    (reply,) = io.take_sent()
    assert isinstance(reply, Reply)
    assert reply.call_id == 9
    return reply


def test_a_models_file_is_read_in_chunks_up_to_an_empty_one(io: Io) -> None:
    content = b""
    while data := read_file(io, "tokenizer.json", len(content)).data:
        assert len(data) <= MAX_FILE_CHUNK_BYTES < len(TOKENIZER)
        content += data
    assert content == TOKENIZER
    assert read_file(io, "tokenizer.json", 2**53 - 1).data == b""


@pytest.mark.parametrize("name", ["config.json", "../tokenizer.json", "/etc/passwd", "", None])
def test_no_file_outside_the_model_card_is_served(io: Io, name: str | None) -> None:
    reply = read_file(io, name)
    assert not reply.ok
    assert reply.data is None
    assert "this model has tokenizer.json" in (reply.message or "")
