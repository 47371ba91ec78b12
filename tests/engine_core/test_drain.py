"""A drain at the message handler: what goes on, what is refused, who is told, and when it is
over.
"""

from __future__ import annotations

import math

import pytest

from nanocore.engine_core.io.control_handler import ServedFiles
from nanocore.engine_core.mailbox import AddRequest, BeginDrain, Shutdown
from nanocore.protocol.codec import encode
from nanocore.protocol.messages import (
    Abort,
    Bye,
    Control,
    Draining,
    Error,
    Hello,
    Message,
    Output,
    Ping,
    Pong,
    Reply,
    Submit,
    Welcome,
)
from nanocore.protocol.sockets.options import SendResult
from tests.engine_core.scripted_io import SHUTDOWN_TIMEOUT_S, Io, columns
from tests.engine_core.test_io_thread import Threaded

DRAINING = Draining(deadline_ms=int(SHUTDOWN_TIMEOUT_S * 1e3))


def open_session(io: Io, peer: bytes, minor: int = 9) -> list[Message]:
    """Open a session of this minor version; returns what it is told."""
    io.peers.sent.clear()
    io.receive(Hello(protocol=(1, minor)), peer)
    return io.take_sent()


def begin(io: Io, cause: str = "SIGTERM") -> None:
    io.handler.deliver(BeginDrain(cause), io.now_s)


def is_over(io: Io) -> bool:
    """Whether the step loop would be told to end now."""
    io.flush()
    return not io.inbox.empty()


def test_an_engine_with_nothing_to_do_ends_at_once_and_tells_nobody_before(io: Io) -> None:
    open_session(io, b"b")
    begin(io)
    assert io.inbox.get_nowait() == Shutdown("SIGTERM")
    assert io.take_sent() == []
    io.flush()
    assert io.inbox.empty(), "it is told once"
    assert io.handler.drain.next_look_s == math.inf


def test_what_runs_comes_to_its_end_and_then_the_engine_ends(io: Io) -> None:
    first, second = io.submit("x"), io.submit("y")
    io.take_sent()
    begin(io)
    assert not is_over(io)
    io.step((first, 1), (second, 2), finish=(first,))
    assert not is_over(io)
    io.step((second, 3), finish=(second,))
    assert [columns(output)[1] for output in io.take_sent()] == [[1, 2], [3]]
    assert is_over(io)
    assert io.inbox.get_nowait() == Shutdown("SIGTERM")


def test_new_requests_are_refused_and_told_what_to_do(io: Io) -> None:
    io.submit("x")
    begin(io)
    io.take_sent()
    io.now_s += 10.5
    io.receive(Submit(request_id="y", prompt_token_ids=b"\1\0\0\0"))
    refused = io.take_one(Error)
    assert (refused.code, refused.request_id, refused.retry_after_s) == ("draining", "y", 20)
    assert "SIGTERM" in refused.message
    assert "another engine" in refused.message
    assert io.inbox.empty()
    io.receive(Submit(request_id="x", prompt_token_ids=b"\1\0\0\0"))
    duplicate = io.take_one(Error)
    assert duplicate.code == "duplicate_request_id", "any other would end the one that runs"
    assert list(io.session.requests) == ["x"]


def test_they_are_still_refused_when_the_engine_is_about_to_end(io: Io) -> None:
    begin(io)
    io.inbox.get_nowait()
    io.receive(Submit(request_id="y", prompt_token_ids=b"\1\0\0\0"))
    refused = io.take_one(Error)
    assert refused.code == "draining"
    assert io.inbox.empty()


def test_sessions_are_told_also_new_ones_and_those_of_old_clients_are_not(io: Io) -> None:
    open_session(io, b"b")
    io.submit("x")
    io.take_sent()
    begin(io)
    assert io.peers.sent == [(b"b", DRAINING)], "the first one's client speaks 1.0"
    io.receive(Bye(), b"b")
    io.now_s += 1.5
    welcome, draining = open_session(io, b"c")
    assert isinstance(welcome, Welcome)
    assert draining == Draining(deadline_ms=28_500)
    io.receive(Bye(), b"c")
    (welcome,) = open_session(io, b"d", minor=8)
    assert isinstance(welcome, Welcome)


def test_everything_else_goes_on(io: Io) -> None:
    handle = io.submit("x")
    io.receive(Ping(nonce=3))
    io.take_sent()
    begin(io)
    io.receive(Ping(nonce=4))
    pong = io.take_one(Pong)
    assert pong.nonce == 4
    io.receive(Control(call_id=1, operation="stats"))
    assert not io.inbox.empty()
    io.receive(Abort(request_ids=["x"]))
    io.step(finish=(handle,))
    events = [io.inbox.get_nowait() for _ in range(2)]
    assert is_over(io)
    assert not any(isinstance(event, Shutdown) for event in events)


def test_a_request_that_awaits_its_grammar_runs_to_its_end(io: Io) -> None:
    io.submit_structured("x", "a")
    added = io.next_event(AddRequest)
    begin(io)
    assert not is_over(io)
    io.compile()
    assert not is_over(io)
    io.step((added.request.handle, 1), finish=(added.request.handle,))
    assert is_over(io)


def test_a_client_that_is_gone_is_not_waited_for(io: Io) -> None:
    io.submit("x")
    begin(io)
    io.handler.peer_gone(b"a")
    io.inbox.get_nowait()  # its requests are aborted
    assert is_over(io)


def test_a_slow_client_gets_its_last_words(io: Io) -> None:
    handle = io.submit("x")
    begin(io)
    io.peers.state[b"a"] = SendResult.FULL
    io.step((handle, 7), finish=(handle,))
    assert not is_over(io)
    io.take_sent()
    io.peers.state.clear()
    assert is_over(io)
    (output,) = io.take_sent()
    assert columns(output) == ([handle], [7], None)


@pytest.mark.parametrize("is_slow", [False, True])
def test_the_deadline_ends_what_is_left_and_says_why(io: Io, is_slow: bool) -> None:
    handle = io.submit("x")
    begin(io)
    assert io.handler.drain.next_look_s == io.now_s + SHUTDOWN_TIMEOUT_S
    if is_slow:
        io.peers.state[b"a"] = SendResult.FULL
        io.step((handle, 7), finish=(handle,))
    io.now_s += SHUTDOWN_TIMEOUT_S - 0.1
    assert not is_over(io)
    io.now_s += 0.1
    assert is_over(io)
    reason = "SIGTERM: not done within 30 s (--shutdown-timeout)"
    assert io.inbox.get_nowait() == Shutdown(reason)
    assert io.handler.drain.next_look_s == math.inf


def test_without_time_it_ends_at_once_and_tells_nobody_before(files: ServedFiles) -> None:
    io = Io(files, shutdown_timeout_s=0.0)
    open_session(io, b"b")
    io.submit("x")
    io.take_sent()
    begin(io)
    assert io.inbox.get_nowait() == Shutdown("SIGTERM")
    assert io.take_sent() == []


def test_what_is_paused_is_not_waited_for(io: Io) -> None:
    io.submit("x")
    io.receive(Control(call_id=1, operation="pause"))
    io.inbox.get_nowait()
    begin(io)
    shutdown = io.next_event(Shutdown)
    assert shutdown.reason.startswith("SIGTERM: the engine is paused")


def test_a_pause_that_is_over_is_none_and_no_other_may_begin(io: Io) -> None:
    io.submit("x")
    for operation in ("pause", "resume"):
        io.receive(Control(call_id=1, operation=operation))
        io.inbox.get_nowait()
    begin(io)
    io.take_sent()
    io.receive(Control(call_id=2, operation="pause"))
    reply = io.take_one(Reply)
    assert (reply.call_id, reply.ok) == (2, False)
    assert "drains" in (reply.message or "")
    assert not is_over(io)


def test_a_client_can_ask_for_it_and_a_second_time_changes_nothing(io: Io) -> None:
    open_session(io, b"b")
    handle = io.submit("x")
    io.take_sent()
    io.receive(Control(call_id=5, operation="drain"), b"b")
    reply, draining = io.take_sent()
    assert isinstance(reply, Reply)
    assert (reply.call_id, reply.ok) == (5, True)
    assert "30 s" in (reply.message or "")
    assert draining == DRAINING
    io.now_s += 10
    io.receive(Control(call_id=6, operation="drain"))
    begin(io)
    reply = io.take_one(Reply)
    assert reply.ok
    assert "20 s" in (reply.message or "")
    io.step(finish=(handle,))
    assert is_over(io)
    assert io.inbox.get_nowait() == Shutdown("drain")


def test_the_log_says_when_it_begins_and_when_it_ends(
    io: Io, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    handle = io.submit("x")
    begin(io)
    io.step(finish=(handle,))
    assert is_over(io)
    began, ended = [record.getMessage() for record in caplog.records]
    assert began.startswith("SIGTERM: 1 open request may")
    assert "30 s" in began
    assert ended == "SIGTERM: no requests in flight, exiting"


def test_the_io_thread_begins_it_and_looks_at_its_deadline_in_time(files: ServedFiles) -> None:
    io = Threaded(files, shutdown_timeout_s=0.3)
    handle = io.submit("x")
    io.take_sent()
    io.outbox.put(BeginDrain("SIGINT"))
    waits_ms: list[int] = []

    def wait(timeout_ms: int) -> None:
        if not waits_ms:
            io.socket.incoming.append((b"b", encode(Hello(protocol=(1, 9)))))
        waits_ms.append(timeout_ms)
        io.clock.now_s += timeout_ms / 1e3 if len(waits_ms) > 1 else 0.0
        if not io.inbox.empty():
            io.say_farewell()

    io.socket.on_wait = wait
    io.thread.run()
    assert waits_ms[0] > 900, "as long as no drain is on, it waits for the next check"
    assert waits_ms[1] <= 301
    shutdown = io.next_event(Shutdown)
    assert shutdown.reason.startswith("SIGINT: not done within 0.3 s")
    welcome, draining, *_ = io.take_sent()
    assert isinstance(welcome, Welcome)
    assert isinstance(draining, Draining)
    assert not any(isinstance(message, Output) for message in io.take_sent())
    assert handle in io.handler.sessions.request_ids
