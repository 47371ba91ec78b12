"""The publisher of KV cache events over real ipc sockets, as a router meets it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import xxhash
import zmq

from nanocore.engine_core.io.kv_event_publisher import KVEventPublisher
from nanocore.kv_cache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
)
from nanocore.protocol.codec import pack_int32
from nanocore.protocol.errors import AddressInUseError, ConfigError
from nanocore.protocol.sockets.options import MAX_OBSERVERS
from tests.kv_event_peers import Peers, numbered, peers, untyped
from tests.protocol.zmtp_peer import ZmtpPeer

MakePublisher = Callable[..., KVEventPublisher]
A, B, C = b"a" * 15 + b"\1", b"b" * 8 + bytes(8), b"c" * 8 + b"\xff" * 8
WIRE_A, WIRE_B, WIRE_C = 0x6161616161616101, 0, 2**64 - 1
SECRET = b"tenant-7-secret"


@pytest.fixture
def endpoint(short_path: Path) -> str:
    return f"ipc://{short_path}/events.sock"


@pytest.fixture
def replay_endpoint(short_path: Path) -> str:
    return f"ipc://{short_path}/replay.sock"


@pytest.fixture
def routers() -> Iterator[Peers]:
    with peers() as made:
        yield made


@pytest.fixture
def make(endpoint: str, replay_endpoint: str) -> Iterator[MakePublisher]:
    """Makes publishers at the two endpoints, not started; all are closed at the end."""
    with ExitStack() as stack:

        def made(**arguments: object) -> KVEventPublisher:
            publisher = KVEventPublisher(endpoint, replay_endpoint, **arguments)  # type: ignore[arg-type]
            return stack.enter_context(closing(publisher))

        yield made


@pytest.fixture
def publisher(make: MakePublisher) -> KVEventPublisher:
    publisher = make()
    publisher.start()
    return publisher


def replayed(routers: Peers, endpoint: str, start: int = 0) -> list[int]:
    return routers.replay_client(endpoint).replay(start)


def test_batches_arrive_in_order(
    publisher: KVEventPublisher, routers: Peers, endpoint: str
) -> None:
    router = routers.subscriber(endpoint)
    first = router.join(publisher)
    for sequence in range(first, first + 500):
        publisher.publish(numbered(sequence))
    assert router.sequences_to(first + 499) == [*range(first, first + 500)]


def test_a_batch_is_topic_number_and_the_documented_maps(
    make: MakePublisher, routers: Peers, endpoint: str
) -> None:
    publisher = make(topic="kv@1", medium="CPU", clock=lambda: 12.5)
    publisher.start()
    router = routers.subscriber(endpoint)
    number = router.join(publisher)
    events: list[KVEvent] = [
        BlockStored([A, B], None, pack_int32([1, 2, 3, 2**31 - 1]), 2, SECRET),
        BlockStored([C], B, pack_int32([5, 6]), 2),
        BlockRemoved([A]),
        BlockStored([C], B, pack_int32([5, 6]), 2, group=1),
        BlockRemoved([C], group=1),
        AllBlocksCleared(),
    ]
    publisher.publish(KVEventBatch(number, events))
    topic, sequence, payload = router.receive()
    assert topic == b"kv@1"
    assert sequence == number.to_bytes(8, "big")
    always = {"block_size": 2, "lora_id": None, "lora_name": None, "medium": "CPU"}
    first = {
        "type": "BlockStored",
        "block_hashes": [WIRE_A, WIRE_B],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 2**31 - 1],
        "extra_keys": [[xxhash.xxh3_128_hexdigest(SECRET)], None],
        "group_idx": None,
    }
    second = {
        "type": "BlockStored",
        "block_hashes": [WIRE_C],
        "parent_block_hash": WIRE_B,
        "token_ids": [5, 6],
        "extra_keys": None,
        "group_idx": None,
    }
    removed = {"type": "BlockRemoved", "block_hashes": [WIRE_A], "medium": "CPU", "group_idx": None}
    of_group = [
        second | always | {"group_idx": 1},
        removed | {"block_hashes": [WIRE_C], "group_idx": 1},
    ]
    expected = [first | always, second | always, removed, *of_group, {"type": "AllBlocksCleared"}]
    assert untyped(payload) == [12.5, expected, None]


def test_a_late_subscriber_replays_what_it_missed(
    publisher: KVEventPublisher, routers: Peers, endpoint: str, replay_endpoint: str
) -> None:
    early = routers.subscriber(endpoint)
    missed = early.join(publisher) + 20
    for sequence in range(missed - 20, missed):
        publisher.publish(numbered(sequence))
    early.sequences_to(missed - 1)  # these have left before the late one comes
    late = routers.subscriber(endpoint)
    joined = late.join(publisher, missed)
    assert early.sequences_to(joined - 1)[0] == missed
    publisher.publish(numbered(joined))
    assert late.sequences_to(joined) == [joined]
    assert replayed(routers, replay_endpoint) == [*range(joined + 1)]
    assert replayed(routers, replay_endpoint, missed) == [*range(missed, joined + 1)]
    assert replayed(routers, replay_endpoint, joined + 1) == []


def test_a_replay_repeats_the_payloads_byte_for_byte(
    publisher: KVEventPublisher, routers: Peers, endpoint: str, replay_endpoint: str
) -> None:
    router = routers.subscriber(endpoint)
    number = router.join(publisher)
    publisher.publish(numbered(number))
    _topic, _sequence, payload = router.receive()
    client = routers.replay_client(replay_endpoint)
    client.ask(b"", number.to_bytes(8, "big"))
    assert client.answers() == [(number, payload)]


def test_a_full_queue_drops_and_the_numbers_show_it(
    make: MakePublisher,
    routers: Peers,
    replay_endpoint: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nanocore.engine_core.io.kv_event_publisher.MAX_QUEUED_BATCHES", 3)
    publisher = make()
    with caplog.at_level(logging.WARNING):
        for sequence in range(6):
            publisher.publish(numbered(sequence))
    assert len(caplog.records) == 1, "an episode is logged once"
    publisher.start()
    client = routers.replay_client(replay_endpoint)
    assert client.replay(0) == [0, 1, 2]
    publisher.publish(numbered(6))
    assert client.replay(0) == [0, 1, 2, 6]
    assert [record.args for record in caplog.records] == [(3,), (3,)]


def test_a_replay_client_that_does_not_read_holds_up_nobody(
    publisher: KVEventPublisher, routers: Peers, endpoint: str, replay_endpoint: str
) -> None:
    router = routers.subscriber(endpoint)
    first = router.join(publisher)
    number = first + 3000
    for start in range(first, number, 500):  # less than any high-water mark at a time
        for sequence in range(start, start + 500):
            publisher.publish(numbered(sequence, num_copies=1500))
        router.sequences_to(start + 499)
    sleeper = routers.replay_client(replay_endpoint, max_unread=1)
    sleeper.ask(b"", first.to_bytes(8, "big"))
    assert replayed(routers, replay_endpoint, first) == [*range(first, number)]
    publisher.publish(numbered(number))
    assert router.sequences_to(number) == [number]
    assert [sequence for sequence, _ in sleeper.answers()] == [*range(first, number)]


def test_close_delivers_what_is_queued(
    publisher: KVEventPublisher, routers: Peers, endpoint: str
) -> None:
    router = routers.subscriber(endpoint)
    first = router.join(publisher)
    for sequence in range(first, first + 500):
        publisher.publish(numbered(sequence))
    publisher.close()
    assert router.sequences_to(first + 499) == [*range(first, first + 500)]


def test_close_ends_the_thread_and_frees_the_endpoints(
    publisher: KVEventPublisher, make: MakePublisher, short_path: Path
) -> None:
    publisher.close()
    assert not publisher.is_alive()
    assert [path.suffix for path in short_path.iterdir()] == [".lock", ".lock"]
    publisher.publish(numbered(0))
    publisher.close()
    make()


def test_a_publisher_without_replays_publishes(
    endpoint: str, routers: Peers, short_path: Path
) -> None:
    with closing(KVEventPublisher(endpoint)) as publisher:
        publisher.start()
        routers.subscriber(endpoint).join(publisher)
        assert {path.name for path in short_path.iterdir()} == {"events.sock", "events.lock"}


def test_an_endpoint_has_one_publisher(publisher: KVEventPublisher, endpoint: str) -> None:
    with pytest.raises(AddressInUseError, match=rf"process {os.getpid()}.*--kv-events-endpoint"):
        KVEventPublisher(endpoint)


def test_a_failed_construction_gives_the_first_endpoint_back(
    publisher: KVEventPublisher, short_path: Path, replay_endpoint: str
) -> None:
    other = f"ipc://{short_path}/other.sock"
    with pytest.raises(AddressInUseError, match="--kv-events-replay-endpoint"):
        KVEventPublisher(other, replay_endpoint)
    KVEventPublisher(other).close()


def test_only_ipc_is_served() -> None:
    with pytest.raises(ConfigError, match="only ipc"):
        KVEventPublisher("tcp://*:5557")


def test_a_salt_is_in_no_frame(
    publisher: KVEventPublisher, routers: Peers, endpoint: str, replay_endpoint: str
) -> None:
    router = routers.subscriber(endpoint)
    number = router.join(publisher)
    event = BlockStored([A], None, pack_int32([1, 2]), 2, b"cache_salt\0" + SECRET)
    publisher.publish(KVEventBatch(number, [event]))
    client = routers.replay_client(replay_endpoint)
    frames = router.receive()
    client.ask(b"", number.to_bytes(8, "big"))
    frames += [payload for _sequence, payload in client.answers()]
    assert len(frames) == 4
    for frame in frames:
        assert SECRET not in frame


def test_a_failure_is_logged_and_ends_only_the_events(
    publisher: KVEventPublisher, short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publisher.publish(KVEventBatch(0, [BlockStored([A], None, b"odd", 2)]))
    publisher.join(10)
    assert not publisher.is_alive()
    assert "the KV event thread failed" in caplog.text
    assert not list(short_path.glob("*.sock")), "nobody is left to connect to a dead endpoint"
    publisher.publish(numbered(1))
    publisher.close()


def test_a_subscriber_gets_the_topics_that_it_wants_and_no_others(
    make: MakePublisher, routers: Peers, endpoint: str
) -> None:
    publisher = make(topic="kv@model")
    publisher.start()
    everything = routers.subscriber(endpoint)
    number = everything.join(publisher)
    with zmq.Context() as context, context.socket(zmq.SUB) as chooser:
        chooser.linger = 0
        chooser.connect(endpoint)
        for topic in (b"kv@model2", b"other", b"", b"kv@m"):
            chooser.subscribe(topic)
        chooser.unsubscribe(b"")
        while not chooser.poll(10):
            number += 1
            publisher.publish(numbered(number))
        assert chooser.recv_multipart()[0] == b"kv@model"
        chooser.unsubscribe(b"kv@m")
        while chooser.poll(100):
            chooser.recv_multipart()
            number += 1
            publisher.publish(numbered(number))


@pytest.mark.parametrize("size", [0, 15 * 10**6])
def test_a_message_without_end_costs_its_sender_the_connection_at_both_endpoints(
    publisher: KVEventPublisher, routers: Peers, endpoint: str, replay_endpoint: str, size: int
) -> None:
    router = routers.subscriber(endpoint)
    number = router.join(publisher)
    frame = b"\3" + size.to_bytes(8, "big") + bytes(size)
    for where, kind in ((endpoint, b"SUB"), (replay_endpoint, b"DEALER")):
        with ZmtpPeer(where) as attacker:
            attacker.greet(kind)
            attacker.send_endless_message(frame if size else frame * 1000)
    publisher.publish(numbered(number))
    assert router.sequences_to(number)[-1] == number
    assert replayed(routers, replay_endpoint)[-1] == number
    assert publisher.is_alive()


def test_a_crowd_of_subscribers_is_bounded_and_those_who_subscribed_stay(
    publisher: KVEventPublisher, routers: Peers, endpoint: str
) -> None:
    router = routers.subscriber(endpoint)
    number = router.join(publisher)
    sockets = publisher._socket
    with ExitStack() as crowd:
        for _ in range(MAX_OBSERVERS + 20):
            crowd.enter_context(ZmtpPeer(endpoint))
        while sockets.num_accepted < MAX_OBSERVERS + 21:
            publisher.publish(numbered(number))
            number += 1
            router.receive()
        assert len(sockets.connections) <= MAX_OBSERVERS
        publisher.publish(numbered(number))
        assert router.sequences_to(number)[-1] == number
