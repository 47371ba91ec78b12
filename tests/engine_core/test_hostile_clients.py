"""Clients that flood, do not read, or quote themselves at length: what each of them may cost."""

from __future__ import annotations

import logging

import msgspec
import pytest

from nanocore.engine_core.io.control_handler import MAX_CALLS, ServedFiles
from nanocore.engine_core.io.handshake import SESSION_TIMEOUT_S
from nanocore.engine_core.io.session import MAX_BACKLOG_BYTES
from nanocore.engine_core.mailbox import AbortRequests, AddRequest, ControlReply
from nanocore.protocol.codec import encode
from nanocore.protocol.messages import (
    MAX_FILE_CHUNK_BYTES,
    Abort,
    Bye,
    Control,
    Error,
    Hello,
    Message,
    Ping,
    Pong,
    Refused,
    Reply,
    Submit,
    Welcome,
)
from nanocore.protocol.sockets.options import SendResult
from tests.engine_core.scripted_io import MAX_NUM_CLIENTS, Io, columns


def test_a_client_that_asks_and_never_reads_is_cut_off_before_its_answers_fill_the_memory(
    io: Io, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    handle = io.submit("x")
    io.peers.state[b"a"] = SendResult.FULL
    chunk = Control(call_id=1, operation="read_file", file="tokenizer.json")
    num_bytes = 0
    while io.in_session():
        assert num_bytes <= MAX_BACKLOG_BYTES
        assert io.session.backlog is None or io.session.backlog.num_bytes >= num_bytes
        io.receive(chunk)
        num_bytes += MAX_FILE_CHUNK_BYTES
    assert num_bytes > MAX_BACKLOG_BYTES - 2 * MAX_FILE_CHUNK_BYTES
    assert io.inbox.get_nowait() == AbortRequests([handle])
    assert not io.handler.sessions.slow
    io.check_sessions()
    assert "1 session closed: the client does not read its answers (1)" in caplog.text


def test_what_waits_for_all_clients_is_bounded_together_and_the_greediest_goes(
    files: ServedFiles,
) -> None:
    io = Io(files, max_backlogs_bytes=4 * 2**20)
    chunk = Control(call_id=1, operation="read_file", file="tokenizer.json")
    for peer in (b"b", b"c"):
        io.receive(Hello(protocol=(1, 4)), peer)
    io.peers.state |= dict.fromkeys((b"a", b"b", b"c"), SendResult.FULL)
    for _ in range(12):  # 0.75 MiB each
        for peer in (b"a", b"b"):
            io.receive(chunk, peer)
    assert io.in_session() == {b"a", b"b", b"c"}
    for _ in range(60):
        io.receive(chunk, b"c")
    assert io.in_session() == {b"a", b"b"}


def test_a_session_that_anothers_ping_ends_is_ended_once(
    files: ServedFiles, caplog: pytest.LogCaptureFixture
) -> None:
    """It is silent, too, and its turn to be looked at comes after the other's."""
    caplog.set_level(logging.INFO)

    def fill() -> Io:
        """Client "a" waits for a little less than a MiB, "b" for more: together for too much."""
        io = Io(files, max_backlogs_bytes=2**21)
        io.receive(Hello(protocol=(1, 4)), b"b")
        io.receive(Control(call_id=1, operation="pause"), b"b")
        io.peers.state |= dict.fromkeys((b"a", b"b"), SendResult.FULL)
        chunk = Control(call_id=1, operation="read_file", file="tokenizer.json")
        for peer, count in ((b"b", 24), (b"a", 15)):
            for _ in range(count):
                io.receive(chunk, peer)
        return io

    num_pings = 0
    io = fill()
    while b"b" in io.in_session():
        io.check_sessions()
        num_pings += 1
    io = fill()
    for _ in range(num_pings - 1):
        io.check_sessions()
    io.now_s += SESSION_TIMEOUT_S + 1
    io.receive(Pong(), b"a")
    caplog.clear()
    io.check_sessions()
    assert io.in_session() == {b"a"}
    io.check_sessions()
    assert caplog.messages == ["1 session closed: the client does not read its answers (1)"]
    assert [io.inbox.get().operation for _ in range(io.inbox.qsize())] == ["pause", "resume"]


def test_tokens_for_a_client_that_does_not_read_are_merged_beyond_the_limit_of_answers(
    io: Io,
) -> None:
    handle = io.submit("x")
    io.take_sent()
    io.peers.state[b"a"] = SendResult.FULL
    num_tokens = 3 * MAX_BACKLOG_BYTES // 250
    for token in range(num_tokens):
        io.step((handle, token % 50))
    assert io.in_session() == {b"a"}
    io.peers.state.clear()
    io.flush()
    outputs = [columns(message) for message in io.take_sent()]
    assert sum(len(tokens) for _, tokens, _ in outputs) == num_tokens
    assert [token for _, tokens, _ in outputs for token in tokens][:60] == [*range(50), *range(10)]


def test_merged_tokens_that_are_not_taken_are_not_merged_again(
    io: Io,
) -> None:
    handle = io.submit("x")
    io.take_sent()
    io.peers.state[b"a"] = SendResult.FULL
    io.step((handle, 1))
    for _ in range(3):
        io.flush()
    io.step((handle, 2), finish=(handle,))
    io.flush()
    io.peers.state.clear()
    io.flush()
    first, second = io.take_sent()
    assert columns(first) == ([handle], [1], None)
    assert columns(second) == ([handle], [2], None)


def test_a_request_of_a_client_found_gone_at_its_accepted_is_aborted(io: Io) -> None:
    io.peers.state[b"a"] = SendResult.GONE
    io.receive(Submit(request_id="x", prompt_token_ids=b"\1\0\0\0"))
    added = io.next_event(AddRequest)
    assert io.inbox.get_nowait() == AbortRequests([added.request.handle])


def test_aborts_of_nothing_do_not_wake_the_step_loop(io: Io) -> None:
    io.receive(Abort(request_ids=["nobody", "never"]))
    io.receive(Bye())
    assert io.inbox.empty()


def test_a_request_named_many_times_in_an_abort_is_aborted_once(io: Io) -> None:
    handle = io.submit("x")
    io.receive(Abort(request_ids=["x"] * 1000))
    assert io.inbox.get_nowait() == AbortRequests([handle])


def test_calls_beyond_the_limit_are_refused_until_one_is_answered(io: Io) -> None:
    for call_id in range(MAX_CALLS):
        io.receive(Control(call_id=call_id, operation="stats"))
    assert io.take_sent() == []
    io.receive(Control(call_id=99, operation="stats"))
    reply = io.take_one(Reply)
    assert (reply.call_id, reply.ok) == (99, False)
    assert io.inbox.qsize() == MAX_CALLS
    io.handler.deliver(ControlReply(1, Reply(call_id=0)), io.now_s)
    io.receive(Control(call_id=100, operation="stats"))
    assert io.inbox.qsize() == MAX_CALLS + 1


@pytest.mark.parametrize(
    "frames",
    [
        [b"\x10", msgspec.msgpack.encode({"request_id": "x" * 2**20})],
        [b"\x10", msgspec.msgpack.encode({"x" * 2**20: 1})],
        [b"\x14", msgspec.msgpack.encode({"x" * 2**20: 1})],
        [b"\x30", msgspec.msgpack.encode({"call_id": 1, "operation": "\0" * (2**20 - 50)})],
        [b"\x30", msgspec.msgpack.encode(
            {"call_id": 1, "operation": "read_file", "file": "\0" * (2**20 - 50)})],
        [b"x" * 2**20, b""],
    ],
)  # fmt: skip
def test_an_answer_quotes_little_of_what_it_answers(io: Io, frames: list[bytes]) -> None:
    io.receive_frames(frames)
    (answer,) = io.take_sent()
    assert isinstance(answer, (Error, Reply))
    assert len(encode(answer)[1]) < 4096


def test_closed_sessions_are_logged_together_once_a_second(
    io: Io, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    io.receive(Bye())
    for _ in range(100):
        io.receive(Hello(protocol=(1, 0), client="my secret name"))
        io.receive(Bye())
    assert caplog.records == []
    io.check_sessions()
    assert caplog.messages == ["101 sessions closed: the client said BYE (101)"]
    io.check_sessions()
    assert len(caplog.records) == 1


def test_refused_requests_use_up_no_handles(io: Io) -> None:
    first = io.submit("x")
    for _ in range(10):
        io.receive(Submit(request_id="y", prompt_token_ids=b""))
    assert io.submit("y") == first + 1


@pytest.mark.parametrize("num_chars", [257, 1024, 1025, 10_000])
@pytest.mark.parametrize("sampling", [None, {"top_p": 7.0}], ids=["admission", "decoding"])
def test_a_bad_request_id_is_returned_up_to_one_length_wherever_it_is_refused(
    io: Io, num_chars: int, sampling: dict[str, float] | None
) -> None:
    request_id = "\u00e9" * num_chars
    body = {"request_id": request_id, "prompt_token_ids": b"\1\0\0\0", "sampling": sampling}
    io.receive_frames([b"\x10", msgspec.msgpack.encode(body)])
    error = io.take_one(Error)
    assert error.code == "invalid_request"
    assert error.request_id == (request_id if num_chars <= 1024 else None)


def _hello(io: Io, routing_id: bytes) -> Message:
    """The answer to HELLO from this peer."""
    io.peers.sent.clear()
    io.receive(Hello(protocol=(1, 0)), routing_id)
    ((to, answer),) = io.peers.sent
    assert to == routing_id
    return answer


def test_one_client_too_many_is_refused_until_another_leaves(io: Io) -> None:
    for i in range(1, MAX_NUM_CLIENTS):
        welcome = _hello(io, b"%d" % i)
        assert isinstance(welcome, Welcome)
        assert welcome.limits.max_num_clients == MAX_NUM_CLIENTS
    for _ in range(3):
        refused = _hello(io, b"one too many")
        assert isinstance(refused, Refused)
        assert refused.retry_after_s is not None
        assert f"{MAX_NUM_CLIENTS} clients" in refused.message
        assert "--max-num-clients" in refused.message
    assert b"one too many" not in io.peers.admitted
    io.receive(Bye(), b"1")
    assert isinstance(_hello(io, b"one too many"), Welcome)
    io.check_tables()


def test_a_connection_may_stay_as_long_as_it_has_a_session(io: Io) -> None:
    io.receive(Ping(), b"b")
    assert io.peers.admitted == {b"a"}
    _hello(io, b"b")
    assert io.peers.admitted == {b"a", b"b"}
    io.receive(Bye())
    assert io.peers.admitted == {b"b"}
    io.now_s += 1e9
    io.check_sessions()
    assert io.peers.admitted == set()
