"""A parser written as one pass over a text that is not there yet.

Subclasses say in `run` what they read, with the generators of this class; each yields where it
needs more text. What is read is read once: only a possible mark's beginning waits in `_text`, and
what waits for a decision does so in lists of pieces, so all costs are linear.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Final, TypeAlias, TypeVar

from nanocore.client.chat.events import Reasoning, Text, ToolArguments
from nanocore.client.chat.parsing.marks import SPACE, Marks
from nanocore.client.chat.parsing.parser import ParsedEvent

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
Delta: TypeAlias = Text | Reasoning | ToolArguments
Sink: TypeAlias = Callable[[str], object]
_SPACES: Final = re.compile(f"[{SPACE}]*")


def ignore(text: str) -> None:
    """A sink for what nobody needs."""


class ReadingParser(ABC):
    """An OutputParser that runs as a generator. index: the sample's."""

    def __init__(self, index: int = 0) -> None:
        self._index = index
        self._text = ""
        self._at = 0
        self._ended = False
        self._held: list[str] | None = None
        self._trailing: list[str] = []
        self._num_calls = 0
        self._out: list[ParsedEvent] = []
        self._pending: list[str] = []
        self._pending_kind: type[Delta] | None = None
        self._quick: type[Text] | type[Reasoning] | None = None
        self._risk: re.Pattern[str] | None = None
        self._steps = self.run()

    @abstractmethod
    def run(self) -> Steps[None]:
        """Reads the whole text."""

    def feed(self, delta: str) -> list[ParsedEvent]:
        """The events that this piece of text completes."""
        quick = self._quick
        if quick is not None and self._risk is not None and not self._risk.search(delta):
            return [quick(delta, self._index)] if delta else []
        self._text = self._text[self._at :] + delta
        self._at = 0
        return self._go_on()

    def finish(self) -> list[ParsedEvent]:
        """What was held back."""
        self._ended = True
        return self._go_on()

    def _go_on(self) -> list[ParsedEvent]:
        next(self._steps, None)
        self.flush()
        events, self._out = self._out, []
        return events

    def emit(self, kind: type[Delta], delta: str) -> None:
        """More of this kind, of the last call if it is arguments; one event with its neighbours."""
        if kind is not self._pending_kind:
            self.flush()
            self._pending_kind = kind
        self._pending.append(delta)

    def flush(self) -> None:
        """Makes an event of what was emitted last; one of another kind can follow it."""
        delta = "".join(self._pending)
        self._pending.clear()
        if not delta:
            return
        if self._pending_kind is ToolArguments:
            self._out.append(ToolArguments(self._num_calls - 1, delta, self._index))
        elif self._pending_kind is Reasoning:
            self._out.append(Reasoning(delta, self._index))
        else:
            self._out.append(Text(delta, self._index))

    def take(self, end: int) -> str:
        """The text up to `end`, which is read now."""
        piece = self._text[self._at : end]
        self._at = end
        if self._held is not None:
            self._held.append(piece)
        return piece

    def without_trailing(self, piece: str, characters: str) -> str:
        """All text so far that such characters do not end; what is left waits for more.

        Empty if all of it waits.
        """
        certain = piece.rstrip(characters)
        if not certain:
            self._trailing.append(piece)
            return ""
        self._trailing.append(certain)
        text = "".join(self._trailing)
        self._trailing = [piece[len(certain) :]] if len(certain) < len(piece) else []
        return text

    def fill(self, num_chars: int) -> Steps[bool]:
        """Waits for so many characters; whether they are there."""
        while len(self._text) - self._at < num_chars:
            if self._ended:
                return False
            yield
        return True

    def sees(self, *literals: str) -> Steps[str | None]:
        """Which of these is next, the longest if several are; nothing is read."""
        longest = max(map(len, literals))
        while True:
            rest = self._text[self._at : self._at + longest]
            match = max((s for s in literals if rest.startswith(s)), key=len, default=None)
            num_matched = len(match or "")
            undecided = any(
                len(s) > len(rest) >= num_matched and s.startswith(rest) for s in literals
            )
            if self._ended or not undecided:
                return match
            yield

    def accept(self, *literals: str) -> Steps[str | None]:
        """Reads one of these if it is next, and says which."""
        match = yield from self.sees(*literals)
        if match:
            self.take(self._at + len(match))
        return match

    def span(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Reads as far as this pattern of single characters goes: `[...]*`."""
        pieces = []
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None
            pieces.append(self.take(match.end()))
            if self._at < len(self._text) or self._ended:
                return "".join(pieces)
            yield

    def space(self) -> Steps[str]:
        """Reads white space, and waits for what follows it."""
        return (yield from self.span(_SPACES))

    def before(
        self, marks: Marks, sink: Sink, quick: type[Text] | type[Reasoning] | None = None
    ) -> Steps[str | None]:
        """Gives the text before the first of these marks to `sink`; None if the text ends first.

        quick: while nothing waits, text without any risk of a mark becomes this event at once.
        """
        while True:
            start, mark = marks.find(self._text, self._at, self._ended)
            if start > self._at:
                sink(self.take(start))
            if mark is not None or self._ended:
                return mark
            if quick is not None and start == len(self._text) and not self._trailing:
                self._quick, self._risk = quick, marks.risk
            yield
            self._quick = None

    def until(
        self, marks: Marks, sink: Sink, quick: type[Text] | type[Reasoning] | None = None
    ) -> Steps[str | None]:
        """As `before`, and reads the mark, too."""
        mark = yield from self.before(marks, sink, quick)
        if mark is not None:
            self.take(self._at + len(mark))
        return mark
