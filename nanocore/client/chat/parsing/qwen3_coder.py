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


def _value_ends(call_end: str) -> Marks:
    return Marks((_VALUE_END, *(f"\n{mark}" for mark in (_VALUE_END, *_parts(call_end)))))


def _parts(call_end: str) -> tuple[str, ...]:
    """What may follow a value."""
    return "<parameter=", "</function>", call_end


class Qwen3CoderParser(ToolParser):
    """Values become JSON by the tool's schema; what is unknown or does not parse is a string.

    Strings are streamed, other values come whole. One line break at each end of a value is not
    part of it. A value ends, too, where a new line begins with the next parameter or the end of
    the function; <tool_call> may lack. Any name is taken. What stands between parameters is
    dropped: the rest of a value in which </parameter> stood, for one.
    """

    marks: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    openers: ClassVar[Marks] = Marks(("<tool_call>", "<function="))
    parts: ClassVar[Marks] = Marks(_parts("</tool_call>"))
    value_ends: ClassVar[Marks] = _value_ends("</tool_call>")

    def block(self, opener: str) -> Steps[None]:
        """One call; without <tool_call> around it, too."""
        if opener != "<function=":
            yield from self.space()
            if not (yield from self.accept("<function=")):
                return
        name = yield from self._name()
        if not name:
            return
        self.begin(name)
        yield from self._parameters(name)
        yield from self.space()
        yield from self.accept(self.marks[1])

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
            mark = yield from self.before(self.parts, ignore)
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
        if mark in ("</function>", self.marks[1]):
            self.add("{}" if separator == "{" else "}")

    def _value(self, types: frozenset[str]) -> Steps[None]:
        yield from self.accept("\n")
        if types <= {"string"}:
            self.add('"')
            mark = yield from self.before(self.value_ends, lambda text: self.add(escape(text)))
            if mark is not None:
                self.add('"')
        else:
            pieces: list[str] = []
            mark = yield from self.before(self.value_ends, pieces.append)
            self.add(to_json("".join(pieces), types))
        if mark is not None and mark.endswith(_VALUE_END):
            yield from self.accept(mark)


class SeedOssParser(Qwen3CoderParser):
    """The same with Seed-OSS's tags around a call."""

    marks: ClassVar[tuple[str, ...]] = ("<seed:tool_call>", "</seed:tool_call>")
    openers: ClassVar[Marks] = Marks(("<seed:tool_call>", "<function="))
    parts: ClassVar[Marks] = Marks(_parts("</seed:tool_call>"))
    value_ends: ClassVar[Marks] = _value_ends("</seed:tool_call>")
