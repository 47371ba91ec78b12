"""Llama 3.2 and 4: calls as a Python list, [get_weather(city='Paris', days=3), other()]."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, Final

from nanocore.client.chat.parsing.json_reading import json_string
from nanocore.client.chat.parsing.marks import Marks
from nanocore.client.chat.parsing.python_values import python_to_json
from nanocore.client.chat.parsing.reading import Steps
from nanocore.client.chat.parsing.tool_parser import ToolParser
from nanocore.client.chat.tools import Tool

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]*")
_KEYWORD: Final = re.compile(r"""\s*["']?([A-Za-z0-9_.-]+)["']?\s*[:=](?!=)""")
_QUOTES: Final = {q: Marks((q, "\\")) for q in ("'", '"', "'" * 3, '"' * 3)}
_STRUCTURE: Final = Marks((*_QUOTES, *"()[]{},"))


class PythonicParser(ToolParser):
    """The list begins the text or follows <|python_start|>, and names only the request's tools.

    Nothing is evaluated: see `python_to_json`. An argument is shown when it is complete. One
    without a name has that of the tool's parameter in its place.
    """

    marks: ClassVar[tuple[str, ...]] = ("<|python_start|>", "<|python_end|>")
    openers: ClassVar[Marks] = Marks(("<|python_start|>",))
    is_bare: ClassVar[bool] = True

    @classmethod
    def beginnings(cls, tools: Sequence[Tool]) -> list[str]:
        """The mark, or a list whose first call is of a tool."""
        return [*cls.openers.texts, *(f"[{one.name}(" for one in tools)]

    def block(self, opener: str) -> Steps[None]:
        """One list."""
        yield from self.space()
        if not (yield from self.accept("[")):
            return
        while (yield from self._call()):
            yield from self.space()
            if not (yield from self.accept(",")):
                break
            yield from self.space()
            if (yield from self.sees("]")):
                break
            self.hold(",")
        if self._held is None:
            yield from self.accept("]")
            yield from self.space()
            yield from self.accept("<|python_end|>")

    def _call(self) -> Steps[bool]:
        """Reads NAME(KEY=VALUE, ...); whether it is a call."""
        yield from self.space()
        name = yield from self.span(_NAME)
        if name not in self._tools or not (yield from self.accept("(")):
            return False
        self.begin(name)
        properties = self._tools[name].parameters.get("properties")
        names = list(properties) if isinstance(properties, dict) else []
        arguments: dict[str, None] = {}  # their keys, in order
        while (argument := (yield from self._argument())) is not None:
            found = _KEYWORD.match(argument)
            place = len(arguments)
            key = names[place] if place < len(names) else f"argument_{place}"
            if found is not None:
                key, argument = found[1], argument[found.end() :]
            if argument.strip() and key not in arguments:
                self.add(f"{', ' if arguments else '{'}{json_string(key)}: ")
                self.add(python_to_json(argument))
                arguments[key] = None
            if not (yield from self.accept(",")):
                yield from self.accept(")")
                self.add("}" if arguments else "{}")
                break
        return True

    def _argument(self) -> Steps[str | None]:
        """Reads up to the comma or the bracket that ends an argument; None if neither comes."""
        pieces: list[str] = []
        depth = 0
        while (mark := (yield from self.before(_STRUCTURE, pieces.append))) is not None:
            if not depth and mark in ",)":
                return "".join(pieces)
            yield from self.accept(mark)
            pieces.append(mark)
            if mark in _QUOTES:
                yield from self._string(mark, pieces)
            elif mark in "([{":
                depth += 1
            elif mark in ")]}":
                depth -= 1
        return None

    def _string(self, quote: str, pieces: list[str]) -> Steps[None]:
        """Reads the rest of a string as it is written."""
        while (mark := (yield from self.until(_QUOTES[quote], pieces.append))) is not None:
            pieces.append(mark)
            if mark == quote:
                return
            yield from self.fill(1)
            pieces.append(self.take(self._at + 1))
