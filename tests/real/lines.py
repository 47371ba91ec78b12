"""5,060 texts that are hard to cut into tokens, drawn the same everywhere and by every Python.

Each kind has a generator of its own, which draws by `random()` alone: what the other methods of
random.Random draw may change. text.txt is part of a document of this repository, and stays as it is
when the document changes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

TEXT: Final = (Path(__file__).parent / "text.txt").read_text("utf-8")
NUM_OF_KIND: Final = 430
Item = TypeVar("Item")

_RANGES: Final = (
    (0x61, 0x7A), (0x41, 0x5A), (0xC0, 0xFF), (0x100, 0x17F), (0x370, 0x3FF), (0x400, 0x4FF),
    (0x531, 0x587), (0x5D0, 0x5EA), (0x621, 0x64A), (0x905, 0x939), (0x985, 0x9B9), (0xB85, 0xBB9),
    (0xE01, 0xE3A), (0xE81, 0xEAE), (0xF40, 0xF6C), (0x1000, 0x1021), (0x10D0, 0x10F0),
    (0x1200, 0x135A), (0x1780, 0x17A2), (0x1820, 0x1877), (0x3041, 0x3096), (0x30A1, 0x30FA),
    (0x3105, 0x312F), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xFF21, 0xFF5A), (0x20000, 0x2A6DF),
)  # fmt: skip


class _Draws:
    """A generator of one kind's texts."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed).random

    def below(self, limit: int) -> int:
        return int(self._random() * limit)

    def one(self, items: Sequence[Item]) -> Item:
        return items[self.below(len(items))]

    def joined(self, items: Sequence[str], between: Sequence[str] = ("", " ")) -> str:
        return "".join(self.one(items) + self.one(between) for _ in range(1 + self.below(12)))

    def word(self) -> str:
        first, last = self.one(_RANGES)
        return "".join(chr(first + self.below(last - first + 1)) for _ in range(1 + self.below(9)))

    def words(self) -> str:
        return " ".join(self.word() for _ in range(1 + self.below(8)))

    def marked(self, marks: Sequence[str]) -> str:
        return "".join(
            letter + "".join(self.one(marks) for _ in range(self.below(3)))
            for letter in self.words()
        )

    def any_characters(self) -> str:
        """Code points of all kinds, unassigned ones and NUL among them, but no surrogates."""
        limits = (0x80, 0x250, 0x3000, 0xD800, 0x20000, 0x110000)
        points = (self.below(limits[self.below(len(limits))]) for _ in range(1 + self.below(10)))
        return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)

    def cut_text(self) -> str:
        start = self.below(len(TEXT))
        return TEXT[start : start + 1 + self.below(200)]


def _kinds() -> dict[str, Callable[[_Draws], str]]:
    pieces: dict[str, list[str]] = json.loads(
        (Path(__file__).parent / "fragments.json").read_text("utf-8")
    )
    marks, spaces, emoji, numbers, code, special, english = pieces.values()
    fragments = (emoji, spaces, numbers, code, special)

    def any_kind(draw: _Draws) -> str:
        drawn = (draw.cut_text()[:20], draw.words()[:20], *map(draw.one, fragments))
        return draw.one(drawn)

    return {
        "pieces of the text": _Draws.cut_text,
        "scripts": _Draws.words,
        "combining marks": lambda draw: draw.marked(marks),
        "any characters": _Draws.any_characters,
        "emoji": lambda draw: draw.joined(emoji + english[:4]),
        "white space": lambda draw: draw.joined(spaces, ("", "", "a", "the", ".", "1", "\xe9")),
        "digits": lambda draw: draw.joined(numbers, ("", " ", ",", "a")),
        "code": lambda draw: draw.joined(code, ("", " ", "\n", "\n    ")),
        "special tokens": lambda draw: draw.joined(special, ("", " ", "a", "\n")),
        "English": lambda draw: draw.joined(english, (" ", "", ", ")),
        "all together": lambda draw: "".join(any_kind(draw) for _ in range(1 + draw.below(6))),
    }


def texts() -> list[str]:
    """All of them: the lines of the text, then those of each kind."""
    found = TEXT.splitlines(keepends=True)
    for name, draw_one in _kinds().items():
        draw = _Draws(name)
        found += (draw_one(draw) for _ in range(NUM_OF_KIND))
    return found
