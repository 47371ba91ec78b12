"""The ring of past batches, and replays to clients that are slow, silent or gone."""

from __future__ import annotations

from collections import deque

import pytest

from nanocore.engine_core.io.kv_event_publisher import REPLAY_TIMEOUT_S, ReplayRing, ReplayServer
from nanocore.protocol.kv_events import pack_sequence, replay_end_frames
from nanocore.protocol.sockets.options import SendResult


class FakeRouter:
    """An IpcRouter whose clients take so many messages; what they took is in `taken`."""

    is_busy = False

    def __init__(self) -> None:
        self.incoming: deque[tuple[bytes, list[bytes]]] = deque()
        self.room: dict[bytes, int] = {}
        self.gone: set[bytes] = set()
        self.taken: dict[bytes, list[int | str]] = {}

    def ask(self, client: bytes, start: int) -> None:
        self.incoming.append((client, [b"", pack_sequence(start)]))

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        return self.incoming.popleft() if self.incoming else None

    def send(self, routing_id: bytes, frames: list[bytes]) -> SendResult:
        if routing_id in self.gone:
            return SendResult.GONE
        if self.room.setdefault(routing_id, 1_000_000) == 0:
            return SendResult.FULL
        self.room[routing_id] -= 1
        taken = self.taken.setdefault(routing_id, [])
        end = frames == replay_end_frames()
        taken.append("end" if end else int.from_bytes(frames[2], "big"))
        return SendResult.SENT


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


@pytest.fixture
def ring() -> ReplayRing:
    ring = ReplayRing()
    for sequence in range(1000):
        ring.append(sequence, b"payload")
    return ring


@pytest.fixture
def server(router: FakeRouter, ring: ReplayRing) -> ReplayServer:
    return ReplayServer(router, ring, b"")  # type: ignore[arg-type]


def run_until_idle(server: ReplayServer) -> None:
    while server.turn(0.0) == 0.0:
        pass


def kept(ring: ReplayRing) -> list[int]:
    return [sequence for sequence, _ in ring.between(0, 2**64, 100)]


def test_the_ring_keeps_the_last_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanocore.engine_core.io.kv_event_publisher.MAX_RING_BATCHES", 3)
    ring = ReplayRing()
    assert (kept(ring), ring.last) == ([], -1)
    for sequence in range(5):
        ring.append(sequence, b"x")
    assert (kept(ring), ring.last) == ([2, 3, 4], 4)


def test_the_ring_keeps_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanocore.engine_core.io.kv_event_publisher.MAX_RING_BYTES", 10)
    ring = ReplayRing()
    for sequence, size in enumerate((4, 6, 1, 9, 11, 10)):
        ring.append(sequence, bytes(size))
        assert kept(ring) == [[0], [0, 1], [1, 2], [2, 3], [], [5]][sequence]


def test_the_ring_finds_a_range_across_dropped_batches() -> None:
    ring = ReplayRing()
    for sequence in (0, 1, 5, 6):
        ring.append(sequence, b"x")
    assert [sequence for sequence, _ in ring.between(1, 6, 10)] == [1, 5]
    assert [sequence for sequence, _ in ring.between(3, 9, 1)] == [5]
    assert ring.between(7, 9, 10) == []


def test_a_replay_brings_everything_from_its_start_and_ends(
    server: ReplayServer, router: FakeRouter
) -> None:
    router.ask(b"a", 10)
    run_until_idle(server)
    assert router.taken[b"a"] == [*range(10, 1000), "end"]
    assert server.turn(0.0) is None


@pytest.mark.parametrize("start", [1000, 2**64 - 1])
def test_a_replay_of_the_future_is_empty(
    server: ReplayServer, router: FakeRouter, start: int
) -> None:
    router.ask(b"a", start)
    run_until_idle(server)
    assert router.taken[b"a"] == ["end"]


def test_clients_take_turns(server: ReplayServer, router: FakeRouter) -> None:
    router.ask(b"a", 0)
    router.ask(b"b", 990)
    server.turn(0.0)
    assert router.taken[b"b"] == [*range(990, 1000), "end"]
    assert len(router.taken[b"a"]) < 1000


def test_batches_published_later_are_not_replayed(
    server: ReplayServer, router: FakeRouter, ring: ReplayRing
) -> None:
    router.ask(b"a", 500)
    server.turn(0.0)
    ring.append(1000, b"later")
    run_until_idle(server)
    assert router.taken[b"a"] == [*range(500, 1000), "end"]


def test_a_slow_client_gets_the_rest_when_it_reads(
    server: ReplayServer, router: FakeRouter
) -> None:
    router.room[b"a"] = 7
    router.ask(b"a", 0)
    run_until_idle(server)
    assert router.taken[b"a"] == [*range(7)]
    router.room[b"a"] = 993
    run_until_idle(server)
    assert router.taken[b"a"] == [*range(1000)]
    router.room[b"a"] = 1
    run_until_idle(server)
    assert router.taken[b"a"] == [*range(1000), "end"]


def test_a_client_that_takes_nothing_loses_its_replay(
    server: ReplayServer, router: FakeRouter
) -> None:
    router.room[b"a"] = 7
    router.ask(b"a", 0)
    assert server.turn(0.0) is not None
    assert server.turn(REPLAY_TIMEOUT_S) is not None
    assert server.turn(REPLAY_TIMEOUT_S + 1) is None


def test_a_client_that_left_is_forgotten(server: ReplayServer, router: FakeRouter) -> None:
    router.gone.add(b"a")
    router.ask(b"a", 0)
    assert server.turn(0.0) is None


def test_a_new_request_replaces_the_one_being_answered(
    server: ReplayServer, router: FakeRouter
) -> None:
    router.room[b"a"] = 3
    router.ask(b"a", 0)
    run_until_idle(server)
    router.room[b"a"] = 100
    router.ask(b"a", 998)
    run_until_idle(server)
    assert router.taken[b"a"] == [0, 1, 2, 998, 999, "end"]


def test_what_is_no_request_is_counted_and_harms_nobody(
    server: ReplayServer, router: FakeRouter
) -> None:
    for frames in ([], [b""], [b"", b"short"], [b"x", bytes(8)], [b"", bytes(8), b""]):
        router.incoming.append((b"a", frames))
    router.ask(b"b", 999)
    run_until_idle(server)
    assert router.taken == {b"b": [999, "end"]}


def test_a_flood_of_requests_leaves_turns_for_the_rest(
    server: ReplayServer, router: FakeRouter
) -> None:
    for _ in range(10_000):
        router.ask(b"a", 999)
    assert server.turn(0.0) == 0.0
    assert len(router.incoming) > 9000
