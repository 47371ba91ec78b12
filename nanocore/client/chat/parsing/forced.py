"""Answers that a grammar forces to be calls: there is no text around them."""

from __future__ import annotations

from nanocore.client.chat.events import Text, ToolArguments, ToolBegin
from nanocore.client.chat.parsing.parser import ParsedEvent
from nanocore.client.chat.parsing.reading import Steps
from nanocore.client.chat.parsing.tool_parser import NewId, ToolParser, make_call_id


class NamedToolParser:
    """The whole text is the arguments of one call of this tool.

    The call begins with the first text, or at the end if there was none: it was asked for.
    """

    def __init__(self, name: str, index: int = 0, new_id: NewId = make_call_id) -> None:
        self._name = name
        self._index = index
        self._new_id = new_id
        self._is_begun = False

    def feed(self, delta: str) -> list[ParsedEvent]:
        """All of it as arguments."""
        if not delta:
            return []
        return [*self.finish(), ToolArguments(0, delta, self._index)]

    def finish(self) -> list[ParsedEvent]:
        """The beginning of the call, if it has not begun."""
        if self._is_begun:
            return []
        self._is_begun = True
        return [ToolBegin(0, self._new_id(), self._name, self._index)]


class RequiredToolsParser(ToolParser):
    """The text is [{"name": ..., "parameters" or "arguments": {...}}, ...].

    The grammar allows nothing else: what is no call is the beginning of one that was cut, and is
    dropped.
    """

    is_bare = True

    def feed(self, delta: str) -> list[ParsedEvent]:
        """The calls."""
        return [event for event in super().feed(delta) if not isinstance(event, Text)]

    def finish(self) -> list[ParsedEvent]:
        """The rest of them."""
        return [event for event in super().finish() if not isinstance(event, Text)]

    def block(self, opener: str) -> Steps[None]:
        """The array."""
        yield from self.space()
        if (yield from self.accept("[")):
            yield from self.call_array()
