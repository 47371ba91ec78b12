"""Special tokens that a format does not need, taken out of a text that kept them all."""

from __future__ import annotations

from collections.abc import Collection

from nanocore.client.chat.parsing.marks import Marks
from nanocore.client.chat.parsing.parser import OutputParser, ParsedEvent


class SpecialTextFilter:
    """A stage before a parser that drops these texts, wherever they stand; the longest first.

    For formats whose marks are special tokens: the detokenizer then keeps special tokens, and all
    others are dropped here. A model that spells one out in plain tokens loses it, too.
    """

    def __init__(self, inner: OutputParser, dropped: Collection[str]) -> None:
        self._inner = inner
        self._dropped = Marks(dropped)
        self._held = ""

    def feed(self, delta: str) -> list[ParsedEvent]:
        """What the inner parser makes of the rest of it."""
        if not self._held and not self._dropped.may_begin(delta):
            return self._inner.feed(delta)
        kept = self._kept(self._held + delta, ended=False)
        return self._inner.feed(kept) if kept else []

    def finish(self) -> list[ParsedEvent]:
        """What was held back, here or by the inner parser."""
        kept = self._kept(self._held, ended=True)
        events = self._inner.feed(kept) if kept else []
        return events + self._inner.finish()

    def _kept(self, text: str, ended: bool) -> str:
        kept = []
        at = 0
        while True:
            start, mark = self._dropped.find(text, at, ended)
            kept.append(text[at:start])
            at = start + len(mark or "")
            if mark is None:
                self._held = text[start:]
                return "".join(kept)
