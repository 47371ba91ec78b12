"""Requests that wait for something outside of the step loop, shown with made-up things."""

from __future__ import annotations

from typing import Any

import pytest

from nanocore.engine_core.mailbox import AbortRequests, AddRequest
from nanocore.engine_core.requests.readiness import SIBLING, Prerequisite
from nanocore.engine_core.requests.request import Request
from tests.engine_core.core_under_test import CoreUnderTest
from tests.engine_core.scheduler_checks import Engine, check_idle
from tests.fakes import expected_tokens, make_request

KV_LOAD = Prerequisite("kv_load")
ADAPTER = Prerequisite("adapter")
PROMPT = [1] * 9


def unready(handle: int, *waits: Prerequisite, prompt: list[int] = PROMPT, **more: Any) -> Request:
    request = make_request(handle, prompt, 3, **more)
    for what in waits:
        request.wait_for(what)
    return request


def in_line(engine: Engine) -> list[int]:
    return [request.handle for request in engine.scheduler.waiting]


def counts(engine: Engine) -> tuple[int, int, int]:
    scheduler = engine.scheduler
    return scheduler.num_running, scheduler.num_waiting, scheduler.num_unready


def test_it_holds_up_nobody_and_keeps_its_place() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add(1, [1] * 5)
    engine.step()
    engine.scheduler.add(unready(2, KV_LOAD))
    engine.add(3, [3] * 5)
    assert (in_line(engine), counts(engine)) == ([3], (1, 1, 1))
    engine.scheduler.ready(2, KV_LOAD)
    assert (in_line(engine), counts(engine)) == ([2, 3], (1, 2, 0))
    engine.finish()
    assert engine.tokens[2] == expected_tokens(PROMPT, 3)


def test_those_behind_it_are_admitted_in_the_meantime() -> None:
    engine = Engine()
    engine.scheduler.add(unready(1, KV_LOAD))
    engine.add(2, [2] * 5)
    engine.run()
    assert (engine.tokens.keys(), counts(engine)) == ({2}, (0, 0, 1))
    assert engine.scheduler.next_group() is None, "there is nothing to do"
    engine.scheduler.ready(1, KV_LOAD)
    engine.finish()
    assert engine.tokens.keys() == {1, 2}


def test_it_is_queued_when_all_is_there_in_any_order() -> None:
    for first, second in ((KV_LOAD, ADAPTER), (ADAPTER, KV_LOAD)):
        engine = Engine()
        engine.scheduler.add(unready(1, KV_LOAD, ADAPTER))
        engine.scheduler.ready(1, first)
        assert (in_line(engine), counts(engine)) == ([], (0, 0, 1))
        engine.scheduler.ready(1, second)
        assert in_line(engine) == [1]
        engine.finish()


def test_samples_wait_for_it_and_for_the_first_ones_prompt() -> None:
    engine = Engine()
    request = unready(1, KV_LOAD, n=3)
    second, third = request.waiting_siblings
    assert second.waits_for == third.waits_for == {KV_LOAD, SIBLING}
    engine.scheduler.add(request)
    engine.scheduler.ready(2, KV_LOAD)
    assert (in_line(engine), counts(engine)) == ([], (0, 0, 3)), "it cannot run before the first"
    assert engine.scheduler.next_group() is None
    engine.scheduler.ready(1, KV_LOAD)
    assert (in_line(engine), counts(engine)) == ([1], (0, 2, 1))
    engine.step()
    assert counts(engine) == (2, 0, 1), "the prompt is planned, and the third has not its own"
    engine.scheduler.ready(3, KV_LOAD)
    engine.finish()
    assert engine.num_cached == {1: 0, 2: 8, 3: 8}


@pytest.mark.parametrize("is_first_ready", [True, False])
def test_a_first_sample_that_ends_hands_on_the_prompt_to_one_that_is_ready(
    is_first_ready: bool,
) -> None:
    engine = Engine()
    engine.scheduler.add(unready(1, KV_LOAD, n=3))
    engine.scheduler.ready(3, KV_LOAD)
    if is_first_ready:
        engine.scheduler.ready(1, KV_LOAD)
    engine.scheduler.abort(1)
    assert (in_line(engine), counts(engine)) == ([3], (0, 1, 1))
    engine.step()
    assert counts(engine) == (1, 0, 1), "its prompt is planned"
    engine.scheduler.ready(2, KV_LOAD)
    assert in_line(engine) == [2]
    engine.finish()
    assert engine.tokens.keys() == {2, 3}


def test_a_first_sample_that_ends_before_all_others_are_ready_leaves_them_unready() -> None:
    engine = Engine()
    engine.scheduler.add(unready(1, KV_LOAD, n=3))
    engine.scheduler.abort(1)
    assert (in_line(engine), counts(engine)) == ([], (0, 0, 2))
    engine.scheduler.ready(3, KV_LOAD)
    assert counts(engine) == (0, 0, 2), "it waits for the second one's prompt"
    engine.scheduler.ready(2, KV_LOAD)
    assert (in_line(engine), counts(engine)) == ([2], (0, 2, 0))
    engine.finish()
    assert engine.tokens.keys() == {2, 3}


@pytest.mark.parametrize("handles", [[1, 2], [2, 1], [2]])
def test_it_can_end_at_any_time(handles: list[int]) -> None:
    engine = Engine()
    engine.scheduler.add(unready(1, KV_LOAD, n=2))
    ended = [engine.scheduler.abort(handle) for handle in handles]
    assert [one and one.handle for one in ended] == handles
    assert engine.scheduler.abort(handles[0]) is None
    for handle in (1, 2):
        engine.scheduler.ready(handle, KV_LOAD)  # an event that comes too late is none
    engine.finish()
    assert sorted([*engine.tokens, *handles]) == [1, 2]


def test_a_sessions_others_take_their_turns() -> None:
    """It has no turn before it is in line."""
    engine = Engine(max_num_seqs=1)
    engine.scheduler.add(unready(1, KV_LOAD, client=1))
    for handle, client in ((2, 1), (3, 2)):
        engine.add(handle, [handle] * 5, client=client)
    order = []
    while engine.scheduler.num_requests:
        engine.step()
        order += [request.handle for request in engine.completed.new]
        if order == [2] and engine.scheduler.num_unready:
            engine.scheduler.ready(1, KV_LOAD)
    assert order == [2, 3, 1]


def test_the_loop_rests_while_nothing_else_is_there_and_logs_nothing_of_it() -> None:
    test = CoreUnderTest()
    scheduler, core, inbox = test.scheduler, test.core, test.inbox
    for handle in (1, 2):
        inbox.put(AddRequest(unready(handle, KV_LOAD)))
    core.drain_inbox(wait=False)
    assert core.is_idle
    assert scheduler.num_requests == 0
    inbox.put(AbortRequests([1], "timeout"))
    core.drain_inbox(wait=False)
    (output,) = test.outbox.drain()
    assert [(one.handle, one.finish_reason) for one in output.events] == [(1, "timeout")]
    assert not scheduler.log.take().requests
    scheduler.ready(2, KV_LOAD)
    assert not core.is_idle
    test.finish()
    ended = [one for one in scheduler.log.take().requests if one.kind == "ended"]
    assert [one.request.handle for one in ended] == [2]
    check_idle(scheduler)
