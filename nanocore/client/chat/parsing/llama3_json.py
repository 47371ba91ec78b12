"""Llama 3: calls are objects, {"name": ..., "parameters": {...}}, one or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from nanocore.client.chat.parsing.json_reading import json_string
from nanocore.client.chat.parsing.marks import Marks
from nanocore.client.chat.parsing.reading import Steps
from nanocore.client.chat.parsing.tool_parser import ToolParser
from nanocore.client.chat.tools import Tool


class Llama3JsonParser(ToolParser):
    """Calls may stand in a list, in text, or one after another, with ";" or "," between.

    They must name one of the request's tools and have parameters; other JSON is text.
    """

    marks: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    openers: ClassVar[Marks] = Marks((*marks, "{", "["))

    @classmethod
    def beginnings(cls, tools: Sequence[Tool]) -> list[str]:
        """The mark, or an object that names a tool."""
        return [*cls.marks, *(f'{{"name": {json_string(one.name)}' for one in tools)]

    def block(self, opener: str) -> Steps[None]:
        """Calls up to what is none."""
        is_open = opener == "{"
        is_list = opener == "["
        if opener in self.marks:
            yield from self.space()
            is_list = (yield from self.accept("[")) is not None
        while (yield from self.call_object(must_be_known=True, is_open=is_open)):
            is_open = False
            yield from self.space()
            if is_list and (yield from self.accept("]")):
                return
            self.hold()
            yield from self.accept(";", ",")
