"""Parsers that depend on the request instead of the model's format: forced calls, and filters."""

from __future__ import annotations

from collections.abc import Collection

from nanocore.client.chat.events import Text, ToolArguments, ToolBegin
from nanocore.client.chat.parsing.stream_reader import Marks, OutputParser, ParsedEvent, Steps
from nanocore.client.chat.parsing.tool_parser import NewId, ToolParser, make_call_id


class NamedToolParser:
    """Reads the whole text as the arguments of one call of this tool.

    The call begins with the first text, or at the end if there is none, because it was forced.
    """

    def __init__(self, name: str, index: int = 0, new_id: NewId = make_call_id) -> None:
        self._name = name
        self._index = index
        self._new_id = new_id
        self._is_begun = False

    def feed(self, delta: str) -> list[ParsedEvent]:
        if not delta:
            return []
        return [*self.finish(), ToolArguments(0, delta, self._index)]

    def finish(self) -> list[ParsedEvent]:
        if self._is_begun:
            return []
        self._is_begun = True
        return [ToolBegin(0, self._new_id(), self._name, self._index)]


class RequiredToolsParser(ToolParser):
    """Reads [{"name": ..., "parameters" or "arguments": {...}}, ...].

    The grammar allows nothing else, so other text is the beginning of a call that was cut, and is
    dropped.
    """

    is_bare = True

    def feed(self, delta: str) -> list[ParsedEvent]:
        return [event for event in super().feed(delta) if not isinstance(event, Text)]

    def finish(self) -> list[ParsedEvent]:
        return [event for event in super().finish() if not isinstance(event, Text)]

    def block(self, opener: str) -> Steps[None]:
        yield from self.space()
        if (yield from self.accept("[")):
            yield from self.call_array()


class SpecialTextFilter:
    """Drops these texts before another parser reads the rest; the longest match first.

    For formats whose marks are special tokens: the detokenizer then keeps special tokens, and all
    others are dropped here. A model that spells one out in plain tokens loses it, too.
    """

    def __init__(self, inner: OutputParser, dropped: Collection[str]) -> None:
        self._inner = inner
        self._dropped = Marks(dropped)
        self._held = ""

    def feed(self, delta: str) -> list[ParsedEvent]:
        if not self._held and not self._dropped.may_begin(delta):
            return self._inner.feed(delta)
        kept = self._kept(self._held + delta, ended=False)
        return self._inner.feed(kept) if kept else []

    def finish(self) -> list[ParsedEvent]:
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
