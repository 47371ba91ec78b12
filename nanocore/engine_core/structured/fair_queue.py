"""What clients wait for: each client's in its order, and the clients by turns.

So one that wants much at once delays itself, and others by one item each. An item may wait for
several clients. One thread at a time uses it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items are hashable; an item waits once for a client, however often it is added."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, dict[T, None]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def count(self, client: int) -> int:
        """How many items wait for a client."""
        return len(self._waiting.get(client, ()))

    def add(self, client: int, item: T) -> None:
        """Let it wait behind what waits for this client."""
        self._waiting.setdefault(client, {})[item] = None

    def remove(self, client: int, item: T) -> None:
        """It need not wait for this client any more, if it did."""
        own = self._waiting.get(client)
        if own is not None:
            own.pop(item, None)
            if not own:
                del self._waiting[client]

    def pop(self) -> T:
        """The oldest of the client whose turn it is; it may still wait for others.

        Raises:
            StopIteration: nothing waits.
        """
        client = next(iter(self._waiting))
        item = next(iter(self._waiting[client]))
        self._waiting.move_to_end(client)
        self.remove(client, item)
        return item

    def clear(self) -> None:
        """Nothing waits any more."""
        self._waiting.clear()
