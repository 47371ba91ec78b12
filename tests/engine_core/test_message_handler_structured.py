"""Structured outputs at the message handler: requests that wait until they are compiled."""

from __future__ import annotations

import traceback
from typing import Any

import numpy as np
import pytest

from nanocore.engine_core.grammars.grammar_compiler import NoGrammars
from nanocore.engine_core.io.control_handler import ServedFiles
from nanocore.engine_core.log.metrics import stats_of
from nanocore.engine_core.mailbox import Shutdown
from nanocore.engine_core.requests.request import Request
from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.messages import (
    Abort,
    Accepted,
    Bye,
    Error,
    Event,
    Message,
    Output,
    Submit,
)
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.protocol.sockets.options import SendResult
from nanocore.protocol.structured_outputs import StructuredOutputs
from tests.engine_core.scripted_io import MAX_NUM_QUEUED_REQS, Io
from tests.engine_core.test_admission import admission, submit
from tests.fakes import FakeGrammars, FakeMatcher, make_request


def added(io: Io) -> Request:
    """The one request that waits to be run."""
    io.work()
    (request,) = io.scheduler.waiting
    return request


def aborts(*handles: int, message: str | None = None) -> list[Event]:
    return [Event(handle=h, finish_reason="abort", message=message) for h in handles]


def check_is_forgotten(io: Io) -> None:
    """Nothing of it is left: its id and its places are free, and nothing waits or comes of it."""
    io.compile(len(io.grammars.waiting))
    io.work()
    assert io.take_sent() == []
    assert io.scheduler.num_requests == io.scheduler.num_unready == 0
    assert not io.scheduler.waiting
    assert not io.scheduler.log.take().requests, "it is not logged"
    assert io.handler.sessions.request_ids == {}
    io.check_tables()
    fill_the_queue(io, MAX_NUM_QUEUED_REQS)


def fill_the_queue(io: Io, num: int) -> None:
    for i in range(num):
        io.submit(f"filler {i}")


def test_a_request_that_is_not_known_is_answered_when_it_is_compiled(io: Io) -> None:
    io.scheduler.counters.num_steps = 7
    io.submit_structured("x", "a", n=3)
    io.work()
    assert io.take_sent() == []
    assert not io.scheduler.waiting
    assert io.core.is_idle
    io.scheduler.counters.num_steps = 9
    io.grammars.finish()
    request = added(io)
    accepted = io.take_one(Accepted)
    assert (accepted.request_id, accepted.handle) == ("x", 1)
    assert [sample.handle for sample in request.samples] == [1, 2, 3]
    assert request.arrival == 7, "its place in line is that of its SUBMIT"
    matchers = [sample.matcher for sample in request.samples]
    assert all(isinstance(one, FakeMatcher) for one in matchers)
    assert len(set(map(id, matchers))) == 3, "each sample has its own"
    assert request.compiled_s is not None


def test_one_that_is_known_is_accepted_at_once(io: Io) -> None:
    io.submit_structured("x", "a")
    io.work()
    io.grammars.finish()
    first = added(io)
    io.scheduler.abort(first.handle)
    io.take_sent()
    io.submit_structured("y", "a")
    io.take_one(Accepted)
    request = added(io)
    assert request.compiled_s is None
    assert isinstance(request.matcher, FakeMatcher)
    assert request.matcher is not first.matcher
    assert not io.grammars.waiting


def test_what_cannot_be_compiled_is_an_error_at_once_when_it_is_known(io: Io) -> None:
    io.submit_structured("x", "bad (")
    io.grammars.finish()
    io.work()
    io.submit_structured("y", "bad (")
    for request_id, error in zip("xy", io.take_sent(), strict=True):
        assert isinstance(error, Error)
        assert (error.code, error.request_id) == ("invalid_request", request_id)
        assert "bad (" in error.message
    check_is_forgotten(io)


def test_all_samples_of_what_cannot_be_compiled_are_gone(io: Io) -> None:
    io.submit_structured("x", "bad (", n=3)
    io.grammars.finish()
    io.work()
    io.take_one(Error)
    check_is_forgotten(io)


def test_an_overloaded_compiler_says_when_to_try_again(io: Io) -> None:
    io.submit_structured("x", "busy")
    io.grammars.finish()
    io.work()
    error = io.take_one(Error)
    assert (error.code, error.request_id, error.retry_after_s) == ("overloaded", "x", 3.0)
    check_is_forgotten(io)


def test_a_request_that_is_aborted_while_it_is_compiled_is_accepted_and_ended(io: Io) -> None:
    io.submit_structured("x", "a", n=2)
    io.receive(Abort(request_ids=["x"]))
    io.work()
    accepted, output = io.take_sent()
    assert isinstance(accepted, Accepted)
    assert isinstance(output, Output)
    assert output.events == aborts(1, 2)
    assert len(io.grammars.withdrawn) == 1
    assert io.counters.num_aborts == 2
    check_is_forgotten(io)


@pytest.mark.parametrize("regex", ["a", "bad ("])
def test_whichever_comes_first_of_an_abort_and_the_grammar_is_told(io: Io, regex: str) -> None:
    io.submit_structured("x", regex)
    io.grammars.finish()
    io.receive(Abort(request_ids=["x"]))
    io.work()
    first, *rest = [type(message) for message in io.take_sent()]
    assert (first, rest) == ((Error, []) if regex == "bad (" else (Accepted, [Output]))
    io.submit_structured("y", regex + "2")
    io.receive(Abort(request_ids=["y"]))
    io.grammars.finish()
    io.work()
    assert [type(message) for message in io.take_sent()] == [Accepted, Output]
    assert io.handler.sessions.request_ids == {}


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
    io.grammars.finish()
    io.work()
    io.take_one(Accepted)


def test_handles_that_nobody_was_told_name_nothing(io: Io) -> None:
    io.submit_structured("x", "a", n=2)
    io.receive(Abort(request_ids=[], handles=np.array([1, 2], "<u4").tobytes()))
    assert io.take_sent() == []
    io.grammars.finish()
    assert len(added(io).samples) == 2


def test_a_client_that_is_gone_when_what_waits_is_aborted_takes_the_rest_with_it(io: Io) -> None:
    for request_id in ("x", "y"):
        io.submit_structured(request_id, request_id)
    io.peers.state[b"a"] = SendResult.GONE
    io.receive(Abort(request_ids=["x", "y"]))
    io.work()
    assert io.in_session() == set()
    io.work()
    assert io.scheduler.num_unready == 0
    assert len(io.grammars.withdrawn) == 2


def test_a_session_that_ends_takes_what_is_compiled_with_it(io: Io) -> None:
    io.submit_structured("x", "a", n=2)
    io.receive(Bye())
    io.grammars.finish()
    io.work()
    assert io.take_sent() == []
    assert io.scheduler.num_requests == io.scheduler.num_unready == 0


def test_what_waits_to_be_compiled_counts_as_waiting(io: Io) -> None:
    for i in range(MAX_NUM_QUEUED_REQS // 2):
        io.submit_structured(f"x{i}", "a", n=2)
    assert io.take_sent() == []
    io.submit_structured("one more", "a")
    error = io.take_one(Error)
    assert (error.code, error.request_id) == ("overloaded", "one more")
    io.grammars.finish()
    io.work()
    io.take_sent()
    io.receive(Submit(request_id="y", prompt_token_ids=b"\1\0\0\0"))
    (error,) = io.take_sent()
    assert isinstance(error, Error), "they wait for the step loop now"


def test_stats_count_what_is_compiled_as_waiting(io: Io) -> None:
    io.submit_structured("x", "a", n=2)
    io.submit_structured("y", "b", n=3)
    io.scheduler.add(make_request(9, [1], 2))
    io.receive(Abort(request_ids=["y"]))
    io.work()
    stats = stats_of(io.scheduler, is_paused=False)
    assert (stats.num_requests_waiting, stats.num_aborts) == (2 + 1, 3)
    assert io.scheduler.num_waiting == 1, "steps and the live view leave them out"
    assert [one.request.handle for one in io.scheduler.log.take().requests] == [9]


def test_an_engine_that_stops_ends_what_waits(io: Io) -> None:
    io.submit_structured("x", "a", n=2)
    io.inbox.put(Shutdown("SIGTERM"))
    io.core.run()
    io.work()
    io.handler.say_bye(Shutdown("SIGTERM", failure=False), io.now_s)
    accepted, output, bye = io.take_sent()
    assert isinstance(accepted, Accepted)
    assert isinstance(output, Output)
    assert output.events == aborts(1, 2, message="SIGTERM")
    assert bye == Bye(reason="SIGTERM")


def test_an_engine_that_fails_says_so_once_for_all(io: Io) -> None:
    io.submit_structured("x", "a")
    io.handler.say_bye(Shutdown("it broke", failure=True), io.now_s)
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


def test_what_a_grammar_leaves_out_is_known_before_the_io_thread_can_tell_it(
    io: Io, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ACCEPTED names it, and the io thread may send that as soon as the event is in its outbox."""
    io.submit_structured("x", "a", n=2)
    io.core.drain_inbox(wait=False)
    (request, *_) = io.scheduler._unready.values()
    put, known = io.outbox.put, []

    def look(event: Any) -> None:
        known.append([sample.matcher is not None for sample in request.samples])
        put(event)

    monkeypatch.setattr(io.core._outbox, "put", look)
    io.grammars.finish()
    io.core.drain_inbox(wait=False)
    assert known == [[True, True]]
