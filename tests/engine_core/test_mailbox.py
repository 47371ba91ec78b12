"""The outbox: nothing is lost between a writer and a reader that sleeps on its descriptor."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator

import pytest

from nanocore.engine_core.mailbox import Outbox, Shutdown


@pytest.fixture
def outbox() -> Iterator[Outbox]:
    outbox = Outbox()
    yield outbox
    outbox.close()


def _event(number: int) -> Shutdown:
    return Shutdown(str(number), failure=False)


def _is_readable(outbox: Outbox) -> bool:
    return select.select([outbox.fd], [], [], 0)[0] == [outbox.fd]


def test_a_burst_is_one_wake_up(outbox: Outbox) -> None:
    for number in range(3):
        outbox.put(_event(number))
    assert os.eventfd_read(outbox.fd) == 1
    assert outbox.drain() == [_event(number) for number in range(3)]


def test_after_a_drain_the_next_event_wakes_the_reader_again(outbox: Outbox) -> None:
    for number in range(3):
        assert not _is_readable(outbox)
        outbox.put(_event(number))
        assert _is_readable(outbox)
        assert outbox.drain() == [_event(number)]


def test_draining_an_empty_outbox_gives_nothing(outbox: Outbox) -> None:
    assert outbox.drain() == []
    outbox.put(_event(1))
    assert _is_readable(outbox)


def test_a_reader_that_sleeps_between_drains_gets_everything_in_order(outbox: Outbox) -> None:
    events = [_event(number) for number in range(20_000)]
    writer = threading.Thread(target=lambda: [outbox.put(event) for event in events])
    writer.start()
    received: list[object] = []
    while len(received) < len(events):
        assert select.select([outbox.fd], [], [], 10.0)[0], "a wake-up was lost"
        received += outbox.drain()
    writer.join()
    assert received == events


def test_several_writers_lose_nothing_and_each_keeps_its_order(outbox: Outbox) -> None:
    def put(name: str) -> None:
        for number in range(5_000):
            outbox.put(Shutdown(f"{name} {number}", failure=False))

    writers = [threading.Thread(target=put, args=(name,)) for name in "abc"]
    for writer in writers:
        writer.start()
    received: list[Shutdown] = []
    while len(received) < 15_000:
        assert select.select([outbox.fd], [], [], 10.0)[0], "a wake-up was lost"
        received += outbox.drain()  # type: ignore[arg-type]
    for writer in writers:
        writer.join()
    for name in "abc":
        own = [one.reason for one in received if one.reason.startswith(name)]
        assert own == [f"{name} {number}" for number in range(5_000)]
