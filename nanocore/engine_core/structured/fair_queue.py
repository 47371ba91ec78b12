"""What clients wait for: each client's in its order, and the clients by turns.

So one that wants much at once delays itself, and others by one item each; and no more than so many
of a client's are in hand at a time, so that the others' find somebody free. An item may wait for
several clients. One thread at a time uses it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items are hashable; an item waits once for a client, however often it is added."""

    def __init__(self, max_in_hand: int) -> None:
        self._max_in_hand = max_in_hand
        self._in_hand: Counter[int] = Counter()
        self._waiting: OrderedDict[int, dict[T, None]] = OrderedDict()

    def __bool__(self) -> bool:
        """Whether there is one to pop."""
        return next(self._turns(), None) is not None

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

    def pop(self) -> tuple[int, T]:
        """(a client, its oldest) of the one whose turn it is; it may still wait for others.

        It is in hand until `done`.

        Raises:
            StopIteration: there is none.
        """
        client = next(self._turns())
        item = next(iter(self._waiting[client]))
        self._waiting.move_to_end(client)
        self.remove(client, item)
        self._in_hand[client] += 1
        return client, item

    def done(self, client: int) -> None:
        """One of this client's is in hand no more."""
        self._in_hand[client] -= 1
        if not self._in_hand[client]:
            del self._in_hand[client]

    def clear(self) -> None:
        """Nothing waits any more."""
        self._waiting.clear()

    def _turns(self) -> Iterator[int]:
        """Whose turn it is, and who comes next."""
        return (c for c in self._waiting if self._in_hand[c] < self._max_in_hand)
