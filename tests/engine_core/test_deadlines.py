"""Deadlines: each request's passes once, and what has ended before costs nothing."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from nanocore.engine_core.io.control_handler import ServedFiles
from nanocore.engine_core.io.handshake import PING_INTERVAL_S
from nanocore.engine_core.io.request_handler import Deadlines
from nanocore.engine_core.mailbox import AbortRequests, AddRequest, Shutdown
from nanocore.protocol.messages import Accepted, Event, Output, Submit
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.protocol.structured_outputs import StructuredOutputs
from tests.engine_core.scripted_io import Io
from tests.engine_core.test_io_thread import Threaded

TIMEOUT = "timeout"


def submit(io: Io, request_id: str, timeout_s: float | None, **sampling: object) -> None:
    params = EngineSamplingParams(**sampling)  # type: ignore[arg-type]
    io.receive(
        Submit(
            request_id=request_id,
            prompt_token_ids=b"\1\0\0\0",
            sampling=params,
            timeout_s=timeout_s,
        )
    )


def test_nothing_is_due_before_its_time_and_everything_is_told_once() -> None:
    open_handles = {1, 2, 3, 4}
    deadlines = Deadlines(open_handles)
    assert deadlines.next_s == math.inf
    deadlines.add([1], 30.0)
    deadlines.add([2, 3], 10.0)
    deadlines.add([4], 20.0)
    assert deadlines.next_s == 10.0
    assert deadlines.take_passed(9.9) == []
    open_handles.remove(2)
    assert deadlines.take_passed(10.0) == [3]
    assert deadlines.take_passed(10.0) == []
    open_handles.remove(4)
    assert deadlines.next_s == 30.0, "what has ended wakes nobody"
    assert deadlines.take_passed(99.0) == [1]
    assert deadlines.next_s == math.inf


def test_deadlines_far_away_do_not_outlive_their_requests() -> None:
    open_handles: set[int] = set()
    deadlines = Deadlines(open_handles)
    for handle in range(10_000):
        open_handles.add(handle)
        deadlines.add([handle], 1e6 + handle)
        if handle >= 10:
            open_handles.remove(handle - 10)
        assert len(deadlines._heap) <= 100


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=200))
def test_what_is_open_when_its_time_comes_is_told(requests: list[tuple[int, bool]]) -> None:
    open_handles: set[int] = set()
    deadlines = Deadlines(open_handles)
    for handle, (deadline_s, _) in enumerate(requests):
        open_handles.add(handle)
        deadlines.add([handle], deadline_s)
    open_handles.difference_update(i for i, (_, ends) in enumerate(requests) if ends)
    for now_s in range(10):
        due = {i for i, (s, ends) in enumerate(requests) if s == now_s and not ends}
        assert set(deadlines.take_passed(now_s)) == due


def test_a_request_in_the_step_loop_is_ended_there_when_its_time_has_passed(io: Io) -> None:
    submit(io, "x", 2.0, n=2)
    submit(io, "y", None)
    assert io.handler.requests.deadlines.next_s == io.now_s + 2
    io.handler.requests.end_overdue(io.now_s + 1.9)
    for _ in "xy":
        assert isinstance(io.inbox.get_nowait(), AddRequest)
    assert io.inbox.empty()
    io.handler.requests.end_overdue(io.now_s + 2)
    io.handler.requests.end_overdue(io.now_s + 2)
    assert io.inbox.get_nowait() == AbortRequests([1, 2], TIMEOUT)
    assert io.inbox.empty()


def test_a_sample_that_has_ended_is_left_out(io: Io) -> None:
    submit(io, "x", 2.0, n=3)
    io.inbox.get_nowait()
    io.step((2, 7), finish=(2,))
    io.handler.requests.end_overdue(io.now_s + 2)
    assert io.inbox.get_nowait() == AbortRequests([1, 3], TIMEOUT)


def test_a_request_that_is_compiled_is_accepted_and_ended(io: Io) -> None:
    submit(io, "x", 2.0, n=2, structured_outputs=StructuredOutputs(regex="a"))
    io.handler.requests.end_overdue(io.now_s + 2)
    io.work()
    accepted, output = io.take_sent()
    assert isinstance(accepted, Accepted)
    assert isinstance(output, Output)
    assert output.events == [Event(handle=h, finish_reason=TIMEOUT) for h in (1, 2)]
    assert len(io.grammars.withdrawn) == 1
    io.grammars.finish()
    io.work()
    assert io.take_sent() == []
    assert io.counters.num_aborts == 2
    io.check_tables()


def test_the_time_of_a_request_that_is_compiled_counts_from_its_submit(io: Io) -> None:
    submit(io, "x", 2.0, structured_outputs=StructuredOutputs(regex="a"))
    start_s, io.now_s = io.now_s, io.now_s + 1.5
    io.compile()
    assert isinstance(io.inbox.get_nowait(), AddRequest)
    assert io.handler.requests.deadlines.next_s == start_s + 2
    io.handler.requests.end_overdue(start_s + 2)
    assert io.inbox.get_nowait() == AbortRequests([1], TIMEOUT)


def test_an_id_that_is_used_again_has_its_own_time(io: Io) -> None:
    submit(io, "x", 2.0)
    io.step((1, 7), finish=(1,))
    submit(io, "x", None)
    assert io.handler.requests.deadlines.next_s == math.inf


def test_the_io_thread_wakes_for_a_deadline_and_for_none_that_is_over(
    files: ServedFiles,
) -> None:
    io = Threaded(files)
    io.now_s = io.clock.now_s
    submit(io, "x", PING_INTERVAL_S / 4)
    submit(io, "ends before", 0.1)
    io.step((2, 7), finish=(2,))
    waits_ms: list[int] = []

    def wait(timeout_ms: int) -> None:
        waits_ms.append(timeout_ms)
        io.clock.now_s += timeout_ms / 1e3
        if len(waits_ms) == 2:
            io.outbox.put(Shutdown("enough", failure=False))

    io.socket.on_wait = wait
    io.thread.run()
    assert waits_ms[0] <= PING_INTERVAL_S * 250 + 1
    assert waits_ms[1] > PING_INTERVAL_S * 700, "until the sessions are looked at"
    events = [io.inbox.get_nowait() for _ in range(3)]
    assert events[-1] == AbortRequests([1], TIMEOUT)
    assert io.inbox.empty()
