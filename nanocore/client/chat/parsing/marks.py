"""Finding the marks of a format in a text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

SPACE: Final = " \t\r\n"
"""What counts as white space around calls: JSON's."""


class Marks:
    """Some marks, to be found leftmost and longest.

    texts: the marks. risk: a text in which this pattern finds nothing neither holds a mark nor
    begins one, and does not end in white space.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._whole = frozenset(text for text in texts if text)
        self.texts = tuple(sorted(self._whole))
        self._lengths = sorted({len(text) for text in self._whole}, reverse=True)
        self._begun = frozenset(t[:n] for t in self._whole for n in range(1, len(t)))
        firsts = "".join(sorted({text[0] for text in self._whole}))
        self._first = re.compile(f"[{re.escape(firsts)}]" if firsts else r"(?!)")
        self.risk = re.compile(rf"{self._first.pattern}|[{SPACE}]\Z")

    def find(self, text: str, at: int, ended: bool) -> tuple[int, str | None]:
        """Where from `at` on the first mark begins, and the mark.

        None if there is none: then all before the place is no part of a mark, and what follows is
        the beginning of one, which more text may complete. If ended, none will come.
        """
        lengths = self._lengths
        for candidate in self._first.finditer(text, at):
            start = candidate.start()
            if not ended and len(text) - start < lengths[0] and text[start:] in self._begun:
                return start, None
            for length in lengths:
                if text[start : start + length] in self._whole:
                    return start, text[start : start + length]
        return len(text), None

    def may_begin(self, text: str) -> bool:
        """Whether a mark may begin in this text."""
        return self._first.search(text) is not None
