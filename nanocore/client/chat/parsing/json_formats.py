"""Tool parsers of formats that write calls as JSON: Hermes, Llama 3, Mistral, DeepSeek."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence
from typing import ClassVar, Final

from nanocore.client.chat.parsing.json_reader import json_string
from nanocore.client.chat.parsing.stream_reader import Marks, Steps
from nanocore.client.chat.parsing.tool_parser import ToolParser
from nanocore.client.chat.tools import Tool

_SURPLUS: Final = re.compile(r"[}\]\s]*")


class HermesParser(ToolParser):
    """Any name is accepted. Extra brackets after a call are dropped; its end mark is optional."""

    marks: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    openers: ClassVar[Marks] = Marks(("<tool_call>",))
    closer: ClassVar[str] = "</tool_call>"

    def block(self, opener: str) -> Steps[None]:
        if (yield from self.call_object()):
            yield from self.span(_SURPLUS)
            yield from self.accept(self.closer)


class Llama3JsonParser(ToolParser):
    """Calls may be in a list, in text, or in sequence with ";" or "," in between.

    They must name one of the request's tools and have parameters; other JSON is text.
    """

    marks: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    openers: ClassVar[Marks] = Marks((*marks, "{", "["))

    @classmethod
    def beginnings(cls, tools: Sequence[Tool]) -> list[str]:
        return [*cls.marks, *(f'{{"name": {json_string(one.name)}' for one in tools)]

    def block(self, opener: str) -> Steps[None]:
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


_NAME: Final = re.compile(r"[A-Za-z0-9_.-]*")
_ID: Final = re.compile(r"[A-Za-z0-9]*")
_ID_CHARACTERS: Final = string.ascii_letters + string.digits
_ID_CHARS: Final = 9


class MistralParser(ToolParser):
    """Old and new form; [CALL_ID]ID and [ARGS] are optional. Any name is accepted.

    Ids are nine letters or digits, as these models' templates demand. In the array form an id after
    the arguments is ignored, because these are streamed.
    """

    marks: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    openers: ClassVar[Marks] = Marks(("[TOOL_CALLS]",))

    @staticmethod
    def default_id() -> str:
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_CHARS))

    def block(self, opener: str) -> Steps[None]:
        yield from self.space()
        if (yield from self.accept("[")):
            yield from self.call_array()
            return
        name = yield from self.span(_NAME)
        call_id = None
        if name and (yield from self.accept("[CALL_ID]")):
            call_id = yield from self.span(_ID)
        is_marked = name and (yield from self.accept("[ARGS]"))
        yield from self.space()
        if name and (is_marked or (yield from self.sees("{"))):
            self.begin(name, call_id)
            yield from self.json_value(self.add)


def _mark(words: str) -> str:
    # These tokens have full-width bars, and a block in place of each space.
    return f"<\uff5c{words}\uff5c>".replace(" ", "\u2581")


_CALLS_BEGIN: Final = _mark("tool calls begin")
_CALLS_END: Final = _mark("tool calls end")
_CALL_BEGIN: Final = _mark("tool call begin")
_CALL_END: Final = _mark("tool call end")
_SEPARATOR: Final = _mark("tool sep")
_HEAD_ENDS: Final = Marks((_SEPARATOR, _CALL_END, _CALLS_END))
_LINE: Final = re.compile(r"[^\n`{<]*")


class DeepseekV3Parser(ToolParser):
    """A call is function, separator, a line with the name, and fenced JSON (V3, R1), or name,
    separator and JSON (V3.1). Any name is accepted."""

    marks: ClassVar[tuple[str, ...]] = (
        _CALLS_BEGIN,
        _CALLS_END,
        _CALL_BEGIN,
        _CALL_END,
        _SEPARATOR,
    )
    openers: ClassVar[Marks] = Marks((_CALLS_BEGIN,))
    closer: ClassVar[str] = _CALL_END

    def block(self, opener: str) -> Steps[None]:
        while (yield from self._call()):
            yield from self.space()
            if (yield from self.accept(_CALLS_END)):
                return
            self.hold()

    def _call(self) -> Steps[bool]:
        yield from self.space()
        if not (yield from self.accept(_CALL_BEGIN)):
            return False
        head: list[str] = []
        yield from self.before(_HEAD_ENDS, head.append)
        if not (yield from self.accept(_SEPARATOR)):
            return False
        yield from self.space()
        name = "".join(head)
        if not (yield from self.sees("{")):
            name = yield from self.span(_LINE)
            yield from self.space()
            yield from self.accept("```json", "```")
            yield from self.space()
        if not name.strip() or not (yield from self.sees("{")):
            return False
        self.begin(name.strip())
        yield from self.json_value(self.add)
        yield from self.space()
        yield from self.accept("```")
        yield from self.space()
        yield from self.accept(_CALL_END)
        return True
