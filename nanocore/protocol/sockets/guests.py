"""Guests: the connections of a socket that have no business yet, or none any more.

Whoever can connect can connect often and say nothing. So connections that nobody has vouched for
may stay for a while only, and the longest-standing of them goes first when places are short.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Guests(Generic[Key]):
    """Keys of connections, in the order in which they became guests."""

    def __init__(self) -> None:
        self._since_s: dict[Key, float] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._since_s

    def add(self, key: Key, now_s: float) -> None:
        """Make this connection the newest guest, unless it is a guest already."""
        self._since_s.setdefault(key, now_s)

    def remove(self, key: Key) -> None:
        """This connection is no guest any more; nothing if it was none."""
        self._since_s.pop(key, None)

    def oldest(self) -> Key | None:
        """The one that has been a guest for longest."""
        return next(iter(self._since_s), None)

    def older_than(self, since_s: float) -> Iterator[Key]:
        """Those that have been guests since before then; the oldest first."""
        for key, guest_since_s in list(self._since_s.items()):
            if guest_since_s >= since_s:
                return
            yield key
