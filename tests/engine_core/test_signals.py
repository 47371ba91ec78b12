"""Which signals end an engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from queue import Empty, SimpleQueue

import pytest

from nanocore.engine_core.mailbox import BeginDrain, Inbox, Outbox
from nanocore.engine_core.process.process import handle_signals


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    kept = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield SimpleQueue()
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_a_terminal_that_is_gone_ends_the_engine(inbox: Inbox) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    handle_signals(inbox, Outbox())
    os.kill(os.getpid(), signal.SIGHUP)
    assert inbox.get_nowait().reason == "SIGHUP"  # type: ignore[union-attr]


def test_under_nohup_it_does_not(inbox: Inbox) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    handle_signals(inbox, Outbox())
    os.kill(os.getpid(), signal.SIGHUP)
    with pytest.raises(Empty):
        inbox.get_nowait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_engine_that_is_told_to_end_drains(inbox: Inbox, number: signal.Signals) -> None:
    outbox = Outbox()
    seen = handle_signals(inbox, outbox)
    os.kill(os.getpid(), number)
    assert outbox.drain() == [BeginDrain(number.name)]
    assert inbox.empty()
    assert seen == [number]
