"""Structured outputs at the message handler: requests that wait until they are compiled."""

from __future__ import annotations

import traceback

import numpy as np
import pytest

from nanocore.engine_core.grammars.matcher import NoGrammars
from nanocore.engine_core.io.control_handler import ServedFiles
from nanocore.engine_core.mailbox import AddRequest, ControlReply, Farewell
from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.messages import (
    Abort,
    Accepted,
    Bye,
    Error,
    Event,
    Message,
    Output,
    Reply,
    Submit,
)
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.protocol.sockets.options import SendResult
from nanocore.protocol.structured_outputs import StructuredOutputs
from tests.engine_core.scripted_io import MAX_NUM_QUEUED_REQS, Io
from tests.engine_core.test_admission import admission, submit
from tests.fakes import FakeGrammars, FakeMatcher
from tests.protocol.samples import STATS


def added(io: Io) -> AddRequest:
    """The one request that the step loop was given."""
    event = io.next_event(AddRequest)
    assert io.inbox.empty()
    return event


def aborts(*handles: int, message: str | None = None) -> list[Event]:
    return [Event(handle=h, finish_reason="abort", message=message) for h in handles]


def check_is_forgotten(io: Io) -> None:
    """Nothing of it is left: its id and its places are free, and the step loop got nothing."""
    io.compile(len(io.grammars.waiting))
    assert io.inbox.empty()
    assert len(io.compiling) == 0
    assert io.handler.sessions.request_ids == {}
    io.check_tables()


def fill_the_queue(io: Io, num: int) -> None:
    for i in range(num):
        io.submit(f"filler {i}")


def test_a_request_that_is_not_known_is_answered_when_it_is_compiled(io: Io) -> None:
    io.num_steps = 7
    io.submit_structured("x", "a", n=3)
    assert io.take_sent() == []
    assert io.inbox.empty()
    io.num_steps = 9
    io.compile()
    accepted = io.take_one(Accepted)
    assert (accepted.request_id, accepted.handle) == ("x", 1)
    event = added(io)
    assert [sample.handle for sample in event.request.samples] == [1, 2, 3]
    assert event.arrival == 7, "its place in line is that of its SUBMIT"
    matchers = [sample.matcher for sample in event.request.samples]
    assert all(isinstance(one, FakeMatcher) for one in matchers)
    assert len(set(map(id, matchers))) == 3, "each sample has its own"


def test_one_that_is_known_is_accepted_at_once(io: Io) -> None:
    io.submit_structured("x", "a")
    io.compile()
    io.take_sent()
    first = added(io).request
    io.submit_structured("y", "a")
    io.take_one(Accepted)
    event = added(io)
    assert event.arrival is None
    assert isinstance(event.request.matcher, FakeMatcher)
    assert event.request.matcher is not first.matcher
    assert not io.grammars.waiting


def test_what_cannot_be_compiled_is_an_error_at_once_when_it_is_known(io: Io) -> None:
    io.submit_structured("x", "bad (")
    io.compile()
    io.submit_structured("y", "bad (")
    for request_id, error in zip("xy", io.take_sent(), strict=True):
        assert isinstance(error, Error)
        assert (error.code, error.request_id) == ("invalid_request", request_id)
        assert "bad (" in error.message
    check_is_forgotten(io)
    fill_the_queue(io, MAX_NUM_QUEUED_REQS)  # of which neither takes a place


def test_an_overloaded_compiler_says_when_to_try_again(io: Io) -> None:
    io.submit_structured("x", "busy")
    io.compile()
    error = io.take_one(Error)
    assert (error.code, error.request_id, error.retry_after_s) == ("overloaded", "x", 3.0)
    check_is_forgotten(io)


def test_a_known_error_that_is_raised_again_and_again_does_not_grow() -> None:
    grammars = FakeGrammars()
    wanted = StructuredOutputs(regex="bad (")
    grammars.compile(wanted, lambda _: None)
    grammars.finish()
    desk = admission(grammars=grammars)
    for _ in range(5):
        with pytest.raises(InvalidRequestError) as caught:
            desk.build(submit(3, 4, structured_outputs=wanted), 1, 1)
        assert len(traceback.extract_tb(caught.value.__traceback__)) == 3


def test_an_id_that_waits_is_in_use(io: Io) -> None:
    io.submit_structured("x", "a")
    io.submit_structured("x", "b")
    error = io.take_one(Error)
    assert error.code == "duplicate_request_id"
    io.compile()
    assert isinstance(io.take_sent()[0], Accepted)


def test_handles_that_nobody_was_told_name_nothing(io: Io) -> None:
    io.submit_structured("x", "a", n=2)
    io.receive(Abort(request_ids=[], handles=np.array([1, 2], "<u4").tobytes()))
    assert io.take_sent() == []
    io.compile()
    assert len(added(io).request.samples) == 2


def test_a_client_that_is_gone_when_what_waits_is_aborted_takes_the_rest_with_it(io: Io) -> None:
    for request_id in ("x", "y"):
        io.submit_structured(request_id, request_id)
    io.peers.state[b"a"] = SendResult.GONE
    io.receive(Abort(request_ids=["x", "y"]))
    assert io.in_session() == set()
    check_is_forgotten(io)


def test_what_waits_to_be_compiled_counts_as_waiting(io: Io) -> None:
    for i in range(MAX_NUM_QUEUED_REQS // 2):
        io.submit_structured(f"x{i}", "a", n=2)
    assert io.take_sent() == []
    io.submit_structured("one more", "a")
    error = io.take_one(Error)
    assert (error.code, error.request_id) == ("overloaded", "one more")
    io.compile(len(io.grammars.waiting))
    io.take_sent()
    io.receive(Submit(request_id="y", prompt_token_ids=b"\1\0\0\0"))
    (error,) = io.take_sent()
    assert isinstance(error, Error), "they wait for the step loop now"


def test_stats_count_what_the_step_loop_does_not_know(io: Io) -> None:
    io.submit_structured("x", "a", n=2)
    io.submit_structured("y", "b", n=3)
    io.receive(Abort(request_ids=["y"]))
    io.take_sent()
    io.handler.deliver(ControlReply(1, Reply(call_id=1, stats=STATS)), io.now_s)
    reply = io.take_one(Reply)
    assert reply.stats is not None
    assert (reply.stats.num_requests_waiting, reply.stats.num_aborts) == (2 + 2, 6 + 3)


def test_an_engine_that_stops_ends_what_waits(io: Io) -> None:
    io.submit_structured("x", "a", n=2)
    io.handler.say_bye(Farewell("SIGTERM", failure=False), io.now_s)
    accepted, output, bye = io.take_sent()
    assert isinstance(accepted, Accepted)
    assert isinstance(output, Output)
    assert output.events == aborts(1, 2, message="SIGTERM")
    assert bye == Bye(reason="SIGTERM")


def test_an_engine_that_fails_says_so_once_for_all(io: Io) -> None:
    io.submit_structured("x", "a")
    io.handler.say_bye(Farewell("it broke", failure=True), io.now_s)
    kinds: list[type[Message]] = [type(message) for message in io.take_sent()]
    assert kinds == [Error, Bye]


def test_an_engine_without_a_vocabulary_says_why(files: ServedFiles) -> None:
    desk = admission(grammars=NoGrammars("this model has no tokenizer.json"))
    wanted = StructuredOutputs(json_object=True)
    with pytest.raises(InvalidRequestError, match=r"this model has no tokenizer\.json"):
        desk.build(submit(3, 4, structured_outputs=wanted), 1, 1)
    assert desk.build(submit(3, 4), 1, 1).matcher is None


def test_the_request_is_checked_before_anything_is_compiled(io: Io) -> None:
    sampling = EngineSamplingParams(
        structured_outputs=StructuredOutputs(regex="a"), stop_token_ids=[10**6]
    )
    io.receive(Submit(request_id="x", prompt_token_ids=b"\1\0\0\0", sampling=sampling))
    error = io.take_one(Error)
    assert "stop_token_ids[0]" in error.message
    assert not io.grammars.waiting
