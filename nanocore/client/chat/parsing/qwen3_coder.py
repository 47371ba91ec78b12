"""Qwen3-Coder: calls as tags, <function=NAME> around <parameter=KEY>VALUE</parameter>."""

from __future__ import annotations

from typing import ClassVar, Final

from nanocore.client.chat.parsing.json_reading import escape, json_string
from nanocore.client.chat.parsing.marks import Marks
from nanocore.client.chat.parsing.reading import Steps, ignore
from nanocore.client.chat.parsing.schema_types import to_json, types_of
from nanocore.client.chat.parsing.tool_parser import ToolParser

_NAME_ENDS: Final = Marks((">", "<", "\n"))
_VALUE_END: Final = "</parameter>"
_VALUE_ENDS: Final = Marks(
    (_VALUE_END, f"\n{_VALUE_END}", "\n<parameter=", "\n</function>", "\n</tool_call>")
)
_PARTS: Final = Marks(("<parameter=", "</function>", "</tool_call>"))


class Qwen3CoderParser(ToolParser):
    """Values become JSON by the tool's schema; what is unknown or does not parse is a string.

    Strings are streamed, other values come whole. One line break at each end of a value is not
    part of it. A value ends, too, where a new line begins with the next parameter or the end of
    the function; <tool_call> may lack. Any name is taken. What stands between parameters is
    dropped: the rest of a value in which </parameter> stood, for one.
    """

    marks: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    openers: ClassVar[Marks] = Marks(("<tool_call>", "<function="))

    def block(self, opener: str) -> Steps[None]:
        """One call; without <tool_call> around it, too."""
        if opener == "<tool_call>":
            yield from self.space()
            if not (yield from self.accept("<function=")):
                return
        name = yield from self._name()
        if not name:
            return
        self.begin(name)
        yield from self._parameters(name)
        yield from self.space()
        yield from self.accept("</tool_call>")

    def _name(self) -> Steps[str | None]:
        """Reads a name and the bracket after it."""
        pieces: list[str] = []
        yield from self.before(_NAME_ENDS, pieces.append)
        is_closed = yield from self.accept(">")
        return "".join(pieces).strip() if is_closed else None

    def _parameters(self, name: str) -> Steps[None]:
        tool = self._tools.get(name)
        schema = tool.parameters if tool else {}
        separator = "{"
        while True:
            mark = yield from self.before(_PARTS, ignore)
            if mark != "<parameter=":
                break
            yield from self.accept(mark)
            key = yield from self._name()
            if key is None:
                break
            self.add(f"{separator}{json_string(key)}: ")
            separator = ", "
            yield from self._value(types_of(schema, key))
        yield from self.accept("</function>")
        if mark in ("</function>", "</tool_call>"):
            self.add("{}" if separator == "{" else "}")

    def _value(self, types: frozenset[str]) -> Steps[None]:
        yield from self.accept("\n")
        if types <= {"string"}:
            self.add('"')
            mark = yield from self.before(_VALUE_ENDS, lambda text: self.add(escape(text)))
            if mark is not None:
                self.add('"')
        else:
            pieces: list[str] = []
            mark = yield from self.before(_VALUE_ENDS, pieces.append)
            self.add(to_json("".join(pieces), types))
        if mark is not None and mark.endswith(_VALUE_END):
            yield from self.accept(mark)
