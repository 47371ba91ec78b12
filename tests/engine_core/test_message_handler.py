"""The message handler with fake peers: slow clients, vanished ones, and those that fall silent."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from nanocore.engine_core.io.control_handler import ServedFiles
from nanocore.engine_core.io.message_handler import BACKLOG_TIMEOUT_S, MAX_ENTRIES
from nanocore.engine_core.log.event_log import StepDone
from nanocore.engine_core.mailbox import (
    AbortRequests,
    AddRequest,
    ControlCall,
    Shutdown,
)
from nanocore.protocol.codec import pack_int32
from nanocore.protocol.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Bye,
    Control,
    Error,
    Event,
    Hello,
    Reply,
    Submit,
    Welcome,
)
from nanocore.protocol.metrics import RecentSteps
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.protocol.sockets.options import SendResult
from nanocore.worker.plan import ModelRunnerOutput
from tests.engine_core.scripted_io import MAX_NUM_QUEUED_REQS, Io, columns


def test_a_slow_client_gets_its_tokens_merged_and_in_order(io: Io) -> None:
    first = io.submit("x")
    io.take_sent()
    io.peers.state[b"a"] = SendResult.FULL
    io.step((first, 1))
    second = io.submit("y")  # its ACCEPTED waits, too
    io.step((first, 2), (second, 7))
    io.step((first, 3), finish=(first,))
    io.flush()
    assert io.take_sent() == []
    io.peers.state.clear()
    io.flush()
    accepted, output = io.take_sent()
    assert isinstance(accepted, Accepted)
    assert columns(output) == ([first, second], [1, 2, 3, 7], [3, 1])
    assert output.events == [Event(handle=first, finish_reason="length")]  # type: ignore[attr-defined]
    io.step((second, 8))
    assert columns(io.take_sent()[0]) == ([second], [8], None)
    assert not io.handler.sessions.slow


def test_a_client_that_takes_nothing_for_long_is_cut_off(io: Io) -> None:
    handle = io.submit("x")
    io.peers.state[b"a"] = SendResult.FULL
    io.step((handle, 1))
    io.now_s += BACKLOG_TIMEOUT_S
    io.flush()
    assert io.in_session() == {b"a"}
    io.now_s += 0.1
    io.flush()
    assert io.in_session() == set()
    assert not io.handler.sessions.slow
    assert io.inbox.get_nowait() == AbortRequests([handle])


def test_a_bad_submit_of_an_id_in_use_is_a_duplicate_whatever_else_is_wrong(io: Io) -> None:
    """Its ERROR names the id, and any other code would end the request that runs."""
    io.submit("x")
    io.take_sent()
    body = {"request_id": "x", "prompt_token_ids": b"\1\0\0\0", "sampling": {"top_k": "x"}}
    io.receive_frames([b"\x10", msgspec.msgpack.encode(body)])
    refused = io.take_one(Error)
    assert (refused.code, refused.request_id) == ("duplicate_request_id", "x")


def test_a_failing_engine_says_so_to_everyone(io: Io) -> None:
    io.handler.say_bye(Shutdown("it broke", failure=True), io.now_s)
    error, bye = io.take_sent()
    assert isinstance(error, Error)
    assert (error.code, error.message) == ("engine_dead", "it broke")
    assert bye == Bye(reason="it broke")


def test_the_event_log_is_taken_when_it_is_long_once_a_second_and_at_the_end(io: Io) -> None:
    log = io.scheduler.log
    ways_to_take = (
        (MAX_ENTRIES, io.flush),
        (1, io.check_sessions),
        (1, lambda: io.handler.say_bye(Shutdown("SIGTERM", failure=False), io.now_s)),
    )
    for num_entries, take in ways_to_take:
        for _ in range(num_entries):
            assert len(log) < num_entries
            io.flush()
            log.append(StepDone(0.1))
        assert len(log) == num_entries
        take()
        assert not len(log)


def test_the_last_words_to_a_vanished_client_are_lost_without_harm(io: Io) -> None:
    handle = io.submit("x")
    io.peers.state[b"a"] = SendResult.GONE
    io.handler.say_bye(Shutdown("it broke", failure=True), io.now_s)
    assert io.in_session() == set()
    assert io.inbox.get_nowait() == AbortRequests([handle])
    assert io.inbox.empty()


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
    other = Io(ServedFiles(tmp_path))
    other.submit("x")
    assert other.take_sent()[0] == drawn


def test_who_comes_to_a_queue_that_another_one_has_filled_has_one_request_in_it(io: Io) -> None:
    for i in range(MAX_NUM_QUEUED_REQS):
        io.submit(f"{i}")
    io.receive(Hello(protocol=PROTOCOL_VERSION), b"b")
    welcome = io.take_sent()[-1]
    assert isinstance(welcome, Welcome)
    assert welcome.limits.max_num_queued_bytes == 2**28
    for request_id in ("first", "second"):
        io.receive(Submit(request_id=request_id, prompt_token_ids=b"\1\0\0\0"), b"b")
    accepted, refused = io.take_sent()
    assert isinstance(accepted, Accepted)
    assert accepted.request_id == "first"
    assert isinstance(refused, Error)
    assert (refused.code, refused.request_id) == ("overloaded", "second")
    assert refused.retry_after_s


def test_metrics_are_answered_without_the_step_loop(io: Io) -> None:
    io.receive_frames([b"\x7f", b""])  # breaks the protocol
    io.take_sent()
    io.receive(Control(call_id=7, operation="metrics"))
    reply = io.take_one(Reply)
    values = {one.name: one.samples[0].value for one in reply.metrics or [] if one.samples}
    assert values["num_clients"] == 1
    assert values["num_protocol_errors"] == 1
    assert io.inbox.empty()


def steps_of(io: Io, peer: bytes, after: int = 0) -> RecentSteps:
    io.receive(Control(call_id=7, operation="steps", after=after), peer)
    reply = io.take_one(Reply)
    assert reply.call_id == 7
    assert reply.steps is not None
    return reply.steps


def test_steps_are_answered_without_the_step_loop_and_foreign_requests_have_no_names(
    io: Io,
) -> None:
    io.receive(Hello(protocol=(1, 11)), b"b")
    for peer in (b"a", b"b"):
        io.receive(Submit(request_id="same", prompt_token_ids=b"\1\0\0\0"), peer)
        event = io.next_event(AddRequest)
        io.scheduler.add(event.request)
    io.scheduler.schedule()
    io.scheduler.update(ModelRunnerOutput(rows=pack_int32([0, 1]), token_ids=pack_int32([5, 6])))
    io.take_sent()
    assert [way.request_id for way in steps_of(io, b"a").requests] == ["same", ""]
    seen = steps_of(io, b"b")
    assert [way.request_id for way in seen.requests] == ["", "same"]
    assert [way.way[0] for way in seen.requests] == [("queued", 1000.0)] * 2
    assert seen.steps.num_prefill_tokens == [2]
    assert seen.stats.num_clients == 2
    assert not seen.stats.paused
    assert not steps_of(io, b"b", after=1).steps.number
    assert io.inbox.empty()
    io.receive(Control(call_id=8, operation="pause"))
    assert steps_of(io, b"b").stats.paused
    io.receive(Bye())
    assert not steps_of(io, b"b").stats.paused


@pytest.mark.parametrize("operation", ["pause", "drain", "reset_prefix_cache"])
def test_what_concerns_all_clients_is_an_administrators(io: Io, operation: str) -> None:
    io.peers.users = {b"b"}
    io.receive(Hello(protocol=PROTOCOL_VERSION), b"b")
    welcome = io.take_sent()[0]
    assert isinstance(welcome, Welcome)
    assert welcome.role == "user"
    io.receive(Control(call_id=7, operation=operation), b"b")
    reply = io.take_one(Reply)
    assert (reply.call_id, reply.ok) == (7, False)
    assert reply.message is not None
    assert reply.message.startswith(f"{operation} concerns all clients")
    assert io.inbox.empty()
    assert not io.handler.drain.is_on
    io.receive(Control(call_id=8, operation="resume"), b"b")  # of its own pause, which it has not
    assert isinstance(io.inbox.get_nowait(), ControlCall)
    io.receive(Control(call_id=9, operation=operation))
    assert io.handler.drain.is_on or isinstance(io.inbox.get_nowait(), ControlCall)


def test_only_administrators_go_before_everybody(io: Io) -> None:
    io.peers.users = {b"b"}
    io.receive(Hello(protocol=PROTOCOL_VERSION), b"b")
    io.take_sent()
    said = {}
    for peer in (b"a", b"b"):
        io.receive(Submit(request_id="x", prompt_token_ids=b"\1\0\0\0", priority=-1), peer)
        error = io.take_one(Error)
        said[peer] = error.message
    assert "first come, first served" in said[b"a"]  # by its admission
    assert "values below 0 are for administrators" in said[b"b"]


def read_file(io: Io, name: str | None, offset: int = 0) -> Reply:
    io.receive(Control(call_id=9, operation="read_file", file=name, offset=offset))
    reply = io.take_one(Reply)
    assert reply.call_id == 9
    return reply


@pytest.mark.parametrize("name", ["config.json", "../tokenizer.json", "/etc/passwd", "", None])
def test_no_file_outside_the_model_card_is_served(io: Io, name: str | None) -> None:
    reply = read_file(io, name)
    assert not reply.ok
    assert reply.data is None
    assert "this model has tokenizer.json" in (reply.message or "")
