"""Clients that flood, do not read, or quote themselves at length: what each of them may cost."""

from __future__ import annotations

import logging

import msgspec
import pytest

from nanocore.engine_core.io import session as session_module
from nanocore.engine_core.io import turn
from nanocore.engine_core.io.control_desk import MAX_CALLS
from nanocore.engine_core.io.session import MAX_BACKLOG_BYTES
from nanocore.engine_core.mailbox import AbortRequests, AddRequest, ControlReply, Farewell
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
    Refused,
    Reply,
    Submit,
    Welcome,
)
from nanocore.protocol.sockets import SendResult
from tests.engine_core.scripted_io import MAX_NUM_CLIENTS, Io, columns


def test_a_client_that_asks_and_never_reads_is_cut_off_before_its_answers_fill_the_memory(
    io: Io, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    handle = io.submit("x")
    io.socket.state[b"a"] = SendResult.FULL
    chunk = Control(call_id=1, operation="read_file", file="tokenizer.json")
    num_bytes = 0
    while b"a" in io.thread._sessions:
        assert num_bytes <= MAX_BACKLOG_BYTES
        assert io.session.backlog is None or io.session.backlog.num_bytes >= num_bytes
        io.receive(chunk)
        num_bytes += MAX_FILE_CHUNK_BYTES
    assert num_bytes > MAX_BACKLOG_BYTES - 2 * MAX_FILE_CHUNK_BYTES
    assert io.inbox.get_nowait() == AbortRequests([handle])
    assert io.thread._slow == {}
    io.thread._check_sessions(now_s=0.0)
    assert "1 sessions closed: the client does not read its answers (1)" in caplog.text


def test_what_waits_for_all_clients_is_bounded_together_and_the_greediest_goes(
    io: Io, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "MAX_BACKLOGS_BYTES", 4 * 2**20)
    chunk = encode(Control(call_id=1, operation="read_file", file="tokenizer.json"))
    for peer in (b"b", b"c"):
        io.thread._receive(peer, encode(Hello(protocol=(1, 4))))
    io.socket.state |= dict.fromkeys((b"a", b"b", b"c"), SendResult.FULL)
    for _ in range(12):  # 0.75 MiB each
        for peer in (b"a", b"b"):
            io.thread._receive(peer, chunk)
    assert set(io.thread._sessions) == {b"a", b"b", b"c"}
    for _ in range(60):
        io.thread._receive(b"c", chunk)
    assert set(io.thread._sessions) == {b"a", b"b"}


def test_tokens_for_a_client_that_does_not_read_are_merged_beyond_the_limit_of_answers(
    io: Io,
) -> None:
    handle = io.submit("x")
    io.take_sent()
    io.socket.state[b"a"] = SendResult.FULL
    num_tokens = 3 * MAX_BACKLOG_BYTES // 250
    for token in range(num_tokens):
        io.step((handle, token % 50))
    assert b"a" in io.thread._sessions
    io.socket.state.clear()
    io.thread._flush(io.session, now_s=0.0)
    outputs = [columns(message) for message in io.take_sent()]
    assert sum(len(tokens) for _, tokens, _ in outputs) == num_tokens
    assert [token for _, tokens, _ in outputs for token in tokens][:60] == [*range(50), *range(10)]


def test_merged_tokens_that_are_not_taken_are_not_merged_again(
    io: Io, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = io.submit("x")
    io.take_sent()
    io.socket.state[b"a"] = SendResult.FULL
    io.step((handle, 1))
    for now_s in range(3):
        io.thread._flush(io.session, now_s)
    io.step((handle, 2), finish=(handle,))
    io.thread._flush(io.session, now_s=3)
    io.socket.state.clear()
    io.thread._flush(io.session, now_s=4)
    first, second = io.take_sent()
    assert columns(first) == ([handle], [1], [1])
    assert columns(second) == ([handle], [2], [1])


def test_a_request_of_a_client_found_gone_at_its_accepted_is_aborted(io: Io) -> None:
    io.socket.state[b"a"] = SendResult.GONE
    io.receive(Submit(request_id="x", prompt_token_ids=b"\1\0\0\0"))
    added = io.inbox.get_nowait()
    assert isinstance(added, AddRequest)
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
    (reply,) = io.take_sent()
    assert isinstance(reply, Reply)
    assert (reply.call_id, reply.ok) == (99, False)
    assert io.inbox.qsize() == MAX_CALLS
    io.thread._deliver(ControlReply(1, Reply(call_id=0)))
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
    io.thread._receive(b"a", frames)
    (answer,) = io.take_sent()
    assert isinstance(answer, (Error, Reply))
    assert len(encode(answer)[1]) < 4096


def test_a_bug_that_a_message_meets_costs_its_session_and_not_the_engine(
    io: Io, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handle = io.submit("x")
    io.take_sent()

    def broken(_: object, submit: Submit) -> None:
        raise MemoryError(submit.request_id)

    monkeypatch.setattr(io.thread, "_submit", broken)
    io.receive(Submit(request_id="secret words", prompt_token_ids=b"\1\0\0\0"))
    assert io.take_sent() == [Bye(reason="internal error")]
    assert io.inbox.get_nowait() == AbortRequests([handle])
    assert io.thread._sessions == {}
    assert "MemoryError" in caplog.text
    assert "in _take" in caplog.text
    assert "secret words" not in caplog.text


def test_closed_sessions_are_logged_together_once_a_second(
    io: Io, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    io.receive(Bye())
    for _ in range(100):
        io.receive(Hello(protocol=(1, 0), client="my secret name"))
        io.receive(Bye())
    assert caplog.records == []
    io.thread._check_sessions(now_s=0.0)
    assert caplog.messages == ["101 sessions closed: the client said BYE (101)"]
    io.thread._check_sessions(now_s=1.0)
    assert len(caplog.records) == 1


def test_a_flood_leaves_outputs_and_steps_their_turn(
    io: Io, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 0.0002  # what each message takes, at least
        return now_s

    monkeypatch.setattr(turn.time, "monotonic", clock)
    io.socket.incoming.extend([(b"a", [b"?", b""])] * 1000)
    io.thread._receive_batch()
    num_left = len(io.socket.incoming)
    assert 1 <= 1000 - num_left <= 5
    assert io.thread._turn.rest_s > 0
    io.thread._receive_batch()  # too soon
    assert len(io.socket.incoming) == num_left
    now_s += turn.MAX_TURN_S
    io.thread._receive_batch()
    assert len(io.socket.incoming) < num_left


def test_few_messages_are_taken_without_a_rest(io: Io) -> None:
    io.receive(Ping())
    io.thread._receive_batch()
    assert io.thread._turn.rest_s <= 0


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
    io.thread._receive(b"a", [b"\x10", msgspec.msgpack.encode(body)])
    (error,) = io.take_sent()
    assert isinstance(error, Error)
    assert error.code == "invalid_request"
    assert error.request_id == (request_id if num_chars <= 1024 else None)


def _hello(io: Io, routing_id: bytes) -> Message:
    """The answer to HELLO from this peer."""
    io.socket.sent.clear()
    io.thread._receive(routing_id, encode(Hello(protocol=(1, 0))))
    ((to, answer),) = io.socket.sent
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
    assert b"one too many" not in io.socket.admitted
    io.thread._receive(b"1", encode(Bye()))
    assert isinstance(_hello(io, b"one too many"), Welcome)
    io.check_tables()


def test_a_connection_may_stay_as_long_as_it_has_a_session(io: Io) -> None:
    io.thread._receive(b"b", encode(Ping()))
    assert io.socket.admitted == {b"a"}
    _hello(io, b"b")
    assert io.socket.admitted == {b"a", b"b"}
    io.receive(Bye())
    assert io.socket.admitted == {b"b"}
    io.thread._check_sessions(now_s=1e9)
    assert io.socket.admitted == set()


def test_a_client_that_disconnects_is_gone_at_once(io: Io, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = io.submit("x")
    io.socket.gone = [b"a", b"never in session"]
    monkeypatch.setattr(io.socket, "wait", lambda _: io.outbox.put(Farewell("enough", False)))
    io.thread._serve()
    assert io.inbox.get_nowait() == AbortRequests([handle])
    assert not io.thread._sessions


def test_bytes_that_are_no_message_yet_use_up_the_turn_as_messages_do(
    io: Io, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_looks = 0

    def receive() -> None:
        nonlocal num_looks
        num_looks += 1

    monkeypatch.setattr(io.socket, "receive", receive)
    io.socket.is_busy = True
    io.thread._receive_batch()
    assert num_looks > 1
    assert io.thread._turn.rest_s > 0
