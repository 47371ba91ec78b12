"""StreamReader: base of parsers whose text arrives in pieces.

Subclasses implement `run` with the generators of this class; each yields where it needs more text.
Everything is read once: only a possible beginning of a mark waits in `_text`, and undecided text is
kept as a list of pieces, so all costs are linear.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from typing import Final, Protocol, TypeAlias, TypeVar

from nanocore.client.chat.events import Reasoning, Text, ToolArguments, ToolBegin

SPACE: Final = " \t\r\n"
"""White space around calls, as in JSON."""


class Marks:
    """Marks of a format, to be found leftmost and longest.

    texts: the marks. risk: pattern; a text without a match has no mark, does not end in a mark's
    beginning, and does not end in white space.
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
        """Find the first mark from `at` on; return its start and the mark.

        The mark is None if there is none yet: then text before the start belongs to no mark, and
        the rest may begin one. ended: no more text will come.
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


ParsedEvent = Text | Reasoning | ToolBegin | ToolArguments


class OutputParser(Protocol):
    """A parser of one sample's text.

    The events do not depend on how the text is cut into pieces, once neighbours of one kind are
    joined. Time is linear in the text. Text that may become a mark is held back until that is
    known.
    """

    def feed(self, delta: str) -> list[ParsedEvent]:
        """Return the events that this piece of text completes."""
        ...

    def finish(self) -> list[ParsedEvent]:
        """Return what was held back, when no more text will come. Called once, at the end."""
        ...


T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
Delta: TypeAlias = Text | Reasoning | ToolArguments
Sink: TypeAlias = Callable[[str], object]
_SPACES: Final = re.compile(f"[{SPACE}]*")


def ignore(text: str) -> None:
    """Sink that drops its text."""


class StreamReader(ABC):
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
        """Read the whole text."""

    def feed(self, delta: str) -> list[ParsedEvent]:
        # Fast path: text without a possible mark is an event at once, without the generator.
        quick = self._quick
        if quick is not None and self._risk is not None and not self._risk.search(delta):
            return [quick(delta, self._index)] if delta else []
        self._text = self._text[self._at :] + delta
        self._at = 0
        return self._go_on()

    def finish(self) -> list[ParsedEvent]:
        self._ended = True
        return self._go_on()

    def _go_on(self) -> list[ParsedEvent]:
        next(self._steps, None)
        self.flush()
        events, self._out = self._out, []
        return events

    def emit(self, kind: type[Delta], delta: str) -> None:
        """Add to the pending event; an event of another kind is flushed first."""
        if kind is not self._pending_kind:
            self.flush()
            self._pending_kind = kind
        self._pending.append(delta)

    def flush(self) -> None:
        """Turn pending text into an event."""
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
        """Read the text up to `end`."""
        piece = self._text[self._at : end]
        self._at = end
        if self._held is not None:
            self._held.append(piece)
        return piece

    def without_trailing(self, piece: str, characters: str) -> str:
        """Return the text so far without such characters at its end, which wait for more text.

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
        """Wait for a number of characters; False if the text ends first."""
        while len(self._text) - self._at < num_chars:
            if self._ended:
                return False
            yield
        return True

    def sees(self, *literals: str) -> Steps[str | None]:
        """Return which literal is next, the longest if several are; reads nothing."""
        longest = max(map(len, literals))
        while True:
            rest = self._text[self._at : self._at + longest]
            match = max((s for s in literals if rest.startswith(s)), key=len, default=None)
            num_matched = len(match or "")
            # A longer literal may still follow: wait until more text decides.
            undecided = any(
                len(s) > len(rest) >= num_matched and s.startswith(rest) for s in literals
            )
            if self._ended or not undecided:
                return match
            yield

    def accept(self, *literals: str) -> Steps[str | None]:
        """Read one of these literals if it is next; return it."""
        match = yield from self.sees(*literals)
        if match:
            self.take(self._at + len(match))
        return match

    def span(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read characters that match this pattern: `[...]*`."""
        pieces = []
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None
            pieces.append(self.take(match.end()))
            if self._at < len(self._text) or self._ended:
                return "".join(pieces)
            yield

    def space(self) -> Steps[str]:
        """Read white space, and wait for the character after it."""
        return (yield from self.span(_SPACES))

    def before(
        self, marks: Marks, sink: Sink, quick: type[Text] | type[Reasoning] | None = None
    ) -> Steps[str | None]:
        """Pass the text before the first of these marks to `sink`; None if the text ends first.

        quick: text that cannot contain a mark becomes this event at once, while nothing waits.
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
        """Read as `before` does, and the mark, too."""
        mark = yield from self.before(marks, sink, quick)
        if mark is not None:
            self.take(self._at + len(mark))
        return mark
