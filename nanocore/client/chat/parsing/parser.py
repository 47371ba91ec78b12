"""What every parser of a model's output is: text goes in piece by piece, events come out."""

from __future__ import annotations

from typing import Protocol

from nanocore.client.chat.events import Reasoning, Text, ToolArguments, ToolBegin

ParsedEvent = Text | Reasoning | ToolBegin | ToolArguments


class OutputParser(Protocol):
    """A parser of one sample's text.

    However a text is cut into pieces, the events say the same once neighbours of one kind are
    joined; all together cost time linear in the text. Text that only might become a mark is held
    back until it is known.
    """

    def feed(self, delta: str) -> list[ParsedEvent]:
        """The events that this piece of text completes."""
        ...

    def finish(self) -> list[ParsedEvent]:
        """What was held back, when no more text will come. Called once, and nothing after it."""
        ...
