"""When requests are to end whether they have ended or not: the `timeout_s` of SUBMITs.

A heap from which nothing is taken but its head. What has ended before its deadline is passed over
when its turn comes, or, when such entries are the most, swept out: so a request costs the same
however many there are, and a deadline in a week does not outlive its request by more than others.
Belongs to the io thread, whose time it is told.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from typing import Final

_MIN_SWEPT: Final = 64
"""Entries of ended requests that are left alone."""


class Deadlines:
    """open_handles: of the samples that have not ended; read whenever a deadline is looked at."""

    def __init__(self, open_handles: Collection[int]) -> None:
        self._open_handles = open_handles
        self._heap: list[tuple[float, Sequence[int]]] = []

    def __len__(self) -> int:
        """Entries, those of ended requests that were not swept out included."""
        return len(self._heap)

    @property
    def next_s(self) -> float:
        """When the next one passes; infinity if there is none."""
        while self._heap and not self._open(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def add(self, handles: Sequence[int], deadline_s: float) -> None:
        """Of a request with these samples, which are open."""
        if len(self._heap) > 2 * len(self._open_handles) + _MIN_SWEPT:
            self._heap = [entry for entry in self._heap if self._open(entry[1])]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (deadline_s, handles))

    def take_passed(self, now_s: float) -> list[int]:
        """The open samples whose deadlines have passed by now; they are told once."""
        passed = []
        while self.next_s <= now_s:
            passed += self._open(heapq.heappop(self._heap)[1])
        return passed

    def _open(self, handles: Sequence[int]) -> list[int]:
        return [handle for handle in handles if handle in self._open_handles]
