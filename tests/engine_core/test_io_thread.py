"""The io thread's body over a scripted socket: what it brings to its message handler, and in turns.

The thread is not started: `run` is called, with a clock that moves as it is read, and ends with the
farewell that the script puts into the outbox.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from itertools import pairwise

import pytest
from msgspec.structs import replace

from nanocore.engine_core.config import EngineConfig
from nanocore.engine_core.grammars.grammar_compiler import NoGrammars
from nanocore.engine_core.io.admission import Admission
from nanocore.engine_core.io.control_handler import ServedFiles
from nanocore.engine_core.io.io_thread import MAX_TURN_S, IoThread, ReceiveThrottle, StatsLog
from nanocore.engine_core.io.limits import QueueLimit
from nanocore.engine_core.log.event_log import SchedulerCounters
from nanocore.engine_core.mailbox import AbortRequests, Shutdown
from nanocore.engine_core.requests.request import Request
from nanocore.protocol.codec import encode
from nanocore.protocol.messages import Bye, Error, Output, Ping, Pong, Submit
from nanocore.protocol.sockets.options import SendResult
from tests.engine_core.scripted_io import CARD, SHUTDOWN_TIMEOUT_S, Io, columns, step_output
from tests.engine_core.test_stats_log import REST
from tests.fakes import FakePeers

NO_MESSAGE = [b"?", b""]


class FakeClock:
    """Every look at it costs as much as the cheapest message does."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        self.now_s += 0.0002
        return self.now_s


class FakeSocket(FakePeers):
    """An EngineSocket: what is `incoming` has arrived; on_wait is called instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.incoming: deque[tuple[bytes, list[bytes]]] = deque()
        self.gone: list[bytes] = []
        self.is_busy = False
        self.on_wait: Callable[[int], None] = lambda timeout_ms: None
        self.on_receive: Callable[[], None] = lambda: None
        self.is_closed = False

    def limit(self, max_connections: int, unadmitted_timeout_s: float) -> None: ...

    def watch(self, fd: int) -> None: ...

    def wait(self, timeout_ms: int) -> set[int]:
        self.on_wait(timeout_ms)
        return set()

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        self.on_receive()
        return self.incoming.popleft() if self.incoming else None

    def take_gone(self) -> list[bytes]:
        gone, self.gone = self.gone, []
        return gone

    def close(self) -> None:
        self.is_closed = True


class Threaded(Io):
    """A message handler in its thread, client "a" in session."""

    def __init__(
        self,
        files: ServedFiles,
        admission: Admission | None = None,
        shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S,
        stats_log: StatsLog | None = None,
    ) -> None:
        self.socket = FakeSocket()
        super().__init__(
            files, self.socket, admission=admission, shutdown_timeout_s=shutdown_timeout_s
        )
        self.clock = FakeClock()
        self.thread = IoThread(
            self.socket,  # type: ignore[arg-type]
            max_connections=10,
            handler=self.handler,
            inbox=self.inbox,
            outbox=self.outbox,
            stats_log=stats_log,
            clock=self.clock,
            cpu_clock=self.clock,
        )

    def say_farewell(self, _timeout_ms: int = 0) -> None:
        self.outbox.put(Shutdown("enough", failure=False))


@pytest.fixture
def io(files: ServedFiles) -> Threaded:
    return Threaded(files)


def test_a_deaf_io_thread_ends_the_engine(io: Threaded) -> None:
    def broken(timeout_ms: int) -> None:
        raise RuntimeError("poll failed")

    io.socket.on_wait = broken
    io.thread.run()
    shutdown = io.next_event(Shutdown)
    assert shutdown.failure
    assert "poll failed" in shutdown.reason


def test_messages_and_outputs_are_served_until_the_farewell(io: Threaded) -> None:
    handle = io.submit("x")
    io.take_sent()
    io.outbox.put(step_output(1, (handle, 7)))
    io.socket.incoming.append((b"a", encode(Ping(nonce=3))))
    io.socket.on_wait = io.say_farewell
    io.thread.run()
    output, pong, bye = io.take_sent()
    assert columns(output) == ([handle], [7], None)
    assert isinstance(pong, Pong)
    assert pong.nonce == 3
    assert bye == Bye(reason="enough")
    assert io.socket.is_closed
    assert io.inbox.empty()


def test_a_client_that_disconnects_is_gone_at_once(io: Threaded) -> None:
    handle = io.submit("x")
    io.socket.gone = [b"a", b"never in session"]
    io.socket.on_wait = io.say_farewell
    io.thread.run()
    assert io.inbox.get_nowait() == AbortRequests([handle])
    assert io.inbox.empty()
    assert not io.in_session()


class _BrokenAdmission(Admission):
    def build(self, submit: Submit, handle: int, client: int, is_only: bool = False) -> Request:
        if submit.request_id == "secret words":
            raise MemoryError(submit.request_id)
        return super().build(submit, handle, client, is_only)


def test_a_bug_that_a_message_meets_costs_its_session_and_not_the_engine(
    files: ServedFiles, caplog: pytest.LogCaptureFixture
) -> None:
    limit = QueueLimit(8, 10_000, SchedulerCounters())
    io = Threaded(files, _BrokenAdmission(CARD, EngineConfig(), limit, NoGrammars("none")))
    handle = io.submit("x")
    io.take_sent()
    submit = Submit(request_id="secret words", prompt_token_ids=b"\1\0\0\0")
    io.socket.incoming += [(b"a", encode(submit)), (b"b", encode(Ping()))]
    io.socket.on_wait = io.say_farewell
    io.thread.run()
    bye, other = io.take_sent()
    assert bye == Bye(reason="internal error")
    assert isinstance(other, Error)
    assert other.code == "no_session"
    assert io.inbox.get_nowait() == AbortRequests([handle])
    assert io.inbox.empty()
    assert not io.in_session()
    assert "MemoryError" in caplog.text
    assert "in submit" in caplog.text
    assert "secret words" not in caplog.text


def test_a_flood_leaves_outputs_and_steps_their_turn(io: Threaded) -> None:
    handle = io.submit("x")
    io.take_sent()
    io.socket.incoming.extend([(b"a", NO_MESSAGE)] * 100)
    taken_at_s: list[float] = []

    def note() -> None:
        if io.socket.incoming:
            taken_at_s.append(io.clock.now_s)
        if len(taken_at_s) == 3:
            io.outbox.put(step_output(1, (handle, 7)))
        if not io.socket.incoming:
            io.say_farewell()

    io.socket.on_receive = note
    io.thread.run()
    gaps_s = [later - earlier for earlier, later in pairwise(taken_at_s)]
    ends = [i + 1 for i, gap_s in enumerate(gaps_s) if gap_s > MAX_TURN_S]
    turns = [taken_at_s[i:j] for i, j in zip([0, *ends], [*ends, len(taken_at_s)], strict=True)]
    assert all(1 <= len(turn) <= 5 for turn in turns)
    assert all(after[0] - turn[-1] >= MAX_TURN_S for turn, after in pairwise(turns))
    kinds = [type(message) for message in io.take_sent()]
    assert kinds.index(Output) <= 5, "the output goes before the flood's second turn"
    assert kinds.count(Error) == len(taken_at_s) == 100


def test_few_messages_are_taken_without_a_rest() -> None:
    clock = FakeClock()
    turn = ReceiveThrottle(clock, clock)
    assert turn.begin()
    assert not turn.is_over()
    assert turn.rest_s <= 0
    assert turn.begin()
    clock.now_s += MAX_TURN_S
    assert turn.is_over()
    assert turn.rest_s > 0
    assert not turn.begin()


def test_who_was_kept_waiting_in_his_turn_does_not_rest_for_it() -> None:
    clock, cpu_clock = FakeClock(), FakeClock()
    turn = ReceiveThrottle(clock, cpu_clock)
    assert turn.begin()
    clock.now_s += 100 * MAX_TURN_S
    assert not turn.is_over()
    cpu_clock.now_s += 2 * MAX_TURN_S
    assert turn.is_over()
    assert MAX_TURN_S < turn.rest_s < 4 * MAX_TURN_S


def test_bytes_that_are_no_message_yet_use_up_the_turn_as_messages_do(io: Threaded) -> None:
    num_looks = 0

    def look() -> None:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 1:
            io.say_farewell()

    io.socket.on_receive = look
    io.socket.is_busy = True
    io.thread.run()  # it would look for ever
    assert num_looks > 1
    assert io.inbox.empty()


def test_slow_clients_are_tried_again_soon_and_everyone_is_pinged_every_second(
    io: Threaded,
) -> None:
    handle = io.submit("x")
    io.take_sent()
    io.socket.state[b"a"] = SendResult.FULL
    io.outbox.put(step_output(1, (handle, 7)))
    waits_ms: list[int] = []

    def wait(timeout_ms: int) -> None:
        io.clock.now_s += timeout_ms / 1e3
        waits_ms.append(timeout_ms)
        if len(waits_ms) == 3:
            io.socket.state.clear()
        if len(waits_ms) == 5:
            io.say_farewell()

    io.socket.on_wait = wait
    io.thread.run()
    first, *retries, second, third = waits_ms
    assert retries == [11, 11]
    assert min(first, second, third) > 900
    ping, output, *pings, bye = io.take_sent()
    assert columns(output) == ([handle], [7], None)
    assert [ping, *pings] == [Ping()] * 3
    assert isinstance(bye, Bye)


def test_it_looks_every_second_whether_a_line_of_the_log_is_due(
    files: ServedFiles, caplog: pytest.LogCaptureFixture
) -> None:
    stats = replace(REST, num_requests_running=1)
    io = Threaded(files, stats_log=StatsLog(lambda: stats, 1000.0))

    def wait(_timeout_ms: int) -> None:
        io.clock.now_s += 0.5
        if io.clock.now_s > 1031.0:
            io.say_farewell()

    io.socket.on_wait = wait
    caplog.set_level(logging.INFO)
    io.thread.run()
    assert len([text for text in caplog.messages if text.startswith("Avg prompt")]) == 3
