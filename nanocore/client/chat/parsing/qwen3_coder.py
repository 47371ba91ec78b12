"""Tool parser of Qwen3-Coder: <function=NAME> around <parameter=KEY>VALUE</parameter>.

Values have no quotes: they become JSON by the types that the tool's schema allows.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar, Final

from nanocore.client.chat.parsing.json_reader import escape, json_string
from nanocore.client.chat.parsing.stream_reader import Marks, Steps, ignore
from nanocore.client.chat.parsing.tool_parser import ToolParser

_NAME_ENDS: Final = Marks((">", "<", "\n"))
_VALUE_END: Final = "</parameter>"


def _value_ends(call_end: str) -> Marks:
    return Marks((_VALUE_END, *(f"\n{mark}" for mark in (_VALUE_END, *_parts(call_end)))))


def _parts(call_end: str) -> tuple[str, ...]:
    return "<parameter=", "</function>", call_end


class Qwen3CoderParser(ToolParser):
    """Values become JSON by the tool's schema; without a known type, or if invalid, a string.

    Strings are streamed, other values are emitted whole. One line break at each end of a value is
    not part of it. A value also ends where a new line begins with the next parameter or the end of
    the function; <tool_call> is optional. Any name is accepted. Text between parameters is dropped,
    such as the rest of a value that contained </parameter>.
    """

    marks: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    openers: ClassVar[Marks] = Marks(("<tool_call>", "<function="))
    parts: ClassVar[Marks] = Marks(_parts("</tool_call>"))
    value_ends: ClassVar[Marks] = _value_ends("</tool_call>")

    def block(self, opener: str) -> Steps[None]:
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
    """Parser of Qwen3-Coder's format with Seed-OSS's tags around a call."""

    marks: ClassVar[tuple[str, ...]] = ("<seed:tool_call>", "</seed:tool_call>")
    openers: ClassVar[Marks] = Marks(("<seed:tool_call>", "<function="))
    parts: ClassVar[Marks] = Marks(_parts("</seed:tool_call>"))
    value_ends: ClassVar[Marks] = _value_ends("</seed:tool_call>")


_MAX_SCHEMAS: Final = 64
"""Limit of schemas that are followed for one parameter: they may refer to each other in a
circle."""
_LITERALS: Final = {"true": "boolean", "false": "boolean", "null": "null", "none": "null"}
_KINDS: Final[dict[type, str]] = {
    str: "string", bool: "boolean", type(None): "null", int: "integer", float: "number",
    list: "array", dict: "object",
}  # fmt: skip


def types_of(parameters: dict[str, Any], name: str) -> frozenset[str]:
    """Return the JSON types that a property of a tool's parameters may have; empty if unknown.

    Follows type, anyOf, oneOf, allOf, and $ref within the parameters; without a type, the types of
    the values of enum and const.
    """
    properties = parameters.get("properties")
    pending = [properties.get(name)] if isinstance(properties, dict) else []
    found: set[str] = set()
    for _ in range(_MAX_SCHEMAS):
        if not pending:
            break
        schema = pending.pop()
        if not isinstance(schema, dict):
            continue
        kinds = schema.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        found.update(kind for kind in kinds if isinstance(kind, str))
        if "type" not in schema:
            values = schema["enum"] if isinstance(schema.get("enum"), list) else []
            values = [*values, *([schema["const"]] if "const" in schema else [])]
            found.update(_KINDS[type(value)] for value in values if type(value) in _KINDS)
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(key), list):
                pending += schema[key]
        if isinstance(schema.get("$ref"), str):
            pending.append(_resolved(parameters, schema["$ref"]))
    return frozenset(found)


def _resolved(root: dict[str, Any], reference: str) -> object:
    if not reference.startswith("#/"):
        return None
    node: object = root
    for part in reference[2:].split("/"):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def to_json(text: str, types: frozenset[str]) -> str:
    """Return the text as JSON if it is a value of one of these types; else as a JSON string."""
    stripped = text.strip()
    kind = _LITERALS.get(stripped.lower())
    if kind in types:
        return "null" if kind == "null" else stripped.lower()
    try:
        value = json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json_string(text)
    kind = _KINDS.get(type(value))
    if kind in types or (kind == "integer" and "number" in types):
        return stripped
    return json_string(text)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
