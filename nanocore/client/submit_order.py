"""Requests of one client are submitted in the order in which they were made.

Each waits for a session, the tokenizer or a template first, some longer than others. Whoever is
ready early waits for its turn. Work on a long text steps aside: it holds up nobody.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class SubmitOrder:
    """The order of one client's requests, in one event loop."""

    def __init__(self) -> None:
        self._places: dict[Place, None] = {}  # the first one's turn it is

    def place(self) -> Place:
        """The last one. At the end of a `with` that has it it is the next one's turn."""
        place = Place(self._places)
        self._places[place] = None
        return place


class Place:
    """A request's place in the order."""

    def __init__(self, places: dict[Place, None]) -> None:
        self._places = places
        self._turn = asyncio.Event()

    async def turn(self) -> None:
        """Wait until all earlier requests are submitted, have failed, or stepped aside."""
        if self in self._places and next(iter(self._places)) is not self:
            await self._turn.wait()

    def step_aside(self) -> None:
        """Let others pass. Idempotent."""
        self._places.pop(self, None)
        for first in self._places:
            first._turn.set()
            break

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.step_aside()
