"""Llama 3: the whole text is {"name": ..., "parameters": {...}}, or several joined by ";"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from nanocore.client.chat.parsing.json_reading import json_string
from nanocore.client.chat.parsing.marks import Marks
from nanocore.client.chat.parsing.reading import Steps
from nanocore.client.chat.parsing.tool_parser import ToolParser
from nanocore.client.chat.tools import Tool


class Llama3JsonParser(ToolParser):
    """Calls begin the text or follow <|python_tag|>.

    They must name one of the request's tools and have parameters; other JSON is text.
    """

    marks: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    openers: ClassVar[Marks] = Marks(marks)
    is_bare: ClassVar[bool] = True

    @classmethod
    def beginnings(cls, tools: Sequence[Tool]) -> list[str]:
        """The mark, or an object that names a tool."""
        return [*cls.openers.texts, *(f'{{"name": {json_string(one.name)}' for one in tools)]

    def block(self, opener: str) -> Steps[None]:
        """Calls up to what is none."""
        while (yield from self.call_object(must_be_known=True)):
            yield from self.space()
            self.hold()
            if not (yield from self.accept(";")):
                return
