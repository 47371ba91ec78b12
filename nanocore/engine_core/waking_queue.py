"""A queue between two threads, one of which sleeps in a poller. Imports nothing heavy."""

from __future__ import annotations

import os
import select
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

Item = TypeVar("Item")


class WakingQueue(Generic[Item]):
    """A queue whose reader sleeps in a poller: `fd` is readable while the queue is not empty.

    Any thread puts and one drains. A writer wakes the reader once per burst, not once per event.
    Whoever marks the reader as woken wakes it afterwards, so who finds it marked need not: what it
    has appended is taken either by the drain that takes the mark away, or after that wake-up.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)
        self._items: deque[Item] = deque()
        self._woken = False  # the reader will drain what is in the queue now

    def put(self, item: Item) -> None:
        self._items.append(item)
        if not self._woken:
            self._woken = True
            os.eventfd_write(self.fd, 1)

    def __len__(self) -> int:
        return len(self._items)

    def drain(self) -> list[Item]:
        """Take all items, in order; never waits."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        # In this order: what is appended before this line is taken now, and what is appended after
        # it has a wake-up of its own. A wake-up for nothing may come of it; none is lost.
        self._woken = False
        return [self._items.popleft() for _ in range(len(self._items))]

    def wait(self, timeout_s: float) -> None:
        self._poll.poll(timeout_s * 1e3)

    def close(self) -> None:
        os.close(self.fd)
