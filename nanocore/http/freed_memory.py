"""Memory of large bodies goes back to the system: the C library would keep what they were made of.

glibc has an arena for each thread that tokenizes, and trims none of them but the first by itself.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from typing import Final

LARGE_BYTES: Final = 1 << 18
DELAY_S: Final = 1.0
"""For more of them to end: a trim takes some 20 ms, in a thread."""


def _find_trim() -> Callable[[int], int]:
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim or (lambda _: 0)  # other C libraries have no such function


trim: Final = _find_trim()


class FreedMemory:
    """Of one event loop's requests."""

    def __init__(self) -> None:
        self._is_due = False

    def note(self, num_bytes: int) -> None:
        """A request whose body had so many is over."""
        if num_bytes >= LARGE_BYTES and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(DELAY_S, self._give_back)

    def _give_back(self) -> None:
        self._is_due = False
        asyncio.get_running_loop().run_in_executor(None, trim, 0)
