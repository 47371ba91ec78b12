"""One loop per engine message drives every stream's `send`.

An answer with news puts its delivery into the loop's list; at the next turn of the event loop all
of them are read, encoded and written, and no task wakes for a token.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from nanocore.http.errors import HttpError


class Deliverable(Protocol):
    """What the loop drives."""

    def step(self) -> None:
        """Send what is new."""
        ...

    def tick(self) -> None:
        """Say that the stream lives, if it has said nothing since the last tick."""
        ...

    def fail(self, error: HttpError) -> None:
        """End it with this error, if its client takes it."""
        ...


class DeliveryLoop:
    """All deliveries of a process. Belongs to its event loop.

    keep_alive_s: streams that had nothing to say for that time say that they live.
    """

    def __init__(self, keep_alive_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: list[Deliverable] = []
        self._open: set[Deliverable] = set()
        self._half_s = keep_alive_s / 2
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_busy(self) -> bool:
        """Whether anything is being delivered."""
        return bool(self._open)

    def add(self, delivery: Deliverable) -> None:
        """It takes part until `remove`."""
        self._open.add(delivery)
        if self._timer is None:
            self._timer = self._loop.call_later(self._half_s, self._tick)

    def remove(self, delivery: Deliverable) -> None:
        """It is over."""
        self._open.discard(delivery)
        if not self._open and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def wake(self, delivery: Deliverable) -> None:
        """It has news, to be sent at the loop's next turn, with those of all others."""
        if not self._ready:
            self._loop.call_soon(self._run)
        self._ready.append(delivery)

    def fail_all(self, error: HttpError) -> None:
        """End them with this error, as far as their clients take it."""
        for delivery in list(self._open):
            delivery.fail(error)

    def _run(self) -> None:
        ready, self._ready = self._ready, []
        for delivery in ready:
            delivery.step()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._half_s, self._tick)
        for delivery in list(self._open):
            delivery.tick()
