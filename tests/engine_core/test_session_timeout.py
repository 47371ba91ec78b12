"""For how long the engine waits for a client that says nothing, where the client has a say."""

from __future__ import annotations

import pytest

from nanocore.engine_core.io.handshake import (
    MIN_SILENT_CHECKS,
    SESSION_TIMEOUT_S,
    max_silent_checks,
)
from nanocore.engine_core.mailbox import AbortRequests
from nanocore.protocol.messages import Control, Ping, Pong
from tests.engine_core.scripted_io import Io


def ask(io: Io, timeout_ms: int) -> None:
    io.receive(Ping(session_timeout_ms=timeout_ms))


def checks_to_the_end(io: Io) -> int:
    """The engine's checks, one a second, up to the one that closes the silent session."""
    for num in range(1, 100):
        io.now_s += 1.0
        io.check_sessions()
        if not io.in_session():
            return num
    raise AssertionError("it was never closed")


@pytest.mark.parametrize(
    ("timeout_ms", "num_checks"),
    [(3000, 3), (3999, 3), (10_000, 10), (2000, 2), (1000, 2), (0, 2), (-1, 2), (10**9, 30)],
)
def test_it_is_as_many_checks_as_whole_seconds_in_bounds(timeout_ms: int, num_checks: int) -> None:
    assert max_silent_checks(timeout_ms) == num_checks


def test_a_session_is_given_up_when_its_client_wants_it(io: Io) -> None:
    handle = io.submit("x")
    ask(io, 3000)
    assert checks_to_the_end(io) == 3
    assert io.inbox.get_nowait() == AbortRequests([handle])


def test_the_last_thing_asked_for_counts_and_a_ping_without_asks_for_nothing(io: Io) -> None:
    io.submit("x")
    ask(io, 9000)
    ask(io, 5000)
    io.receive(Ping())
    assert checks_to_the_end(io) == 5


def test_whatever_is_heard_is_a_sign_of_life(io: Io) -> None:
    io.submit("x")
    ask(io, 1000)
    for _ in range(20):
        io.now_s += 1.0
        io.check_sessions()
        io.receive(Pong())
    assert io.in_session()
    assert checks_to_the_end(io) == MIN_SILENT_CHECKS


def test_without_requests_it_waits_as_for_anybody(io: Io) -> None:
    ask(io, 1000)
    assert checks_to_the_end(io) == SESSION_TIMEOUT_S + 1


def test_a_pause_is_not_given_up_before_it_ends(io: Io) -> None:
    io.submit("x")
    ask(io, 2000)
    io.receive(Control(call_id=1, operation="pause"))
    for _ in range(10):
        io.now_s += 1.0
        io.check_sessions()
    assert io.in_session()
    io.receive(Control(call_id=2, operation="resume"))
    assert checks_to_the_end(io) == 2


def test_an_engine_that_stood_still_closes_nobody_for_it(io: Io) -> None:
    io.submit("x")
    ask(io, 3000)
    io.check_sessions()
    io.now_s += 20.0  # it was stopped: its clients had no PING to answer
    io.check_sessions()
    io.receive(Pong())
    assert io.in_session()
    assert checks_to_the_end(io) == 3
