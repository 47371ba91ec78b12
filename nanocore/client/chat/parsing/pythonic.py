"""Llama 3.2 and 4: calls as a Python list, [get_weather(city='Paris', days=3), other()]."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, Final

from nanocore.client.chat.parsing.json_reading import escape, json_string
from nanocore.client.chat.parsing.marks import Marks
from nanocore.client.chat.parsing.python_values import atom_to_json, escape_to_json
from nanocore.client.chat.parsing.reading import Steps
from nanocore.client.chat.parsing.tool_parser import ToolParser
from nanocore.client.chat.tools import Tool

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]*")
_ATOM: Final = re.compile(r"""[^\s'"()\[\]{},:=]*""")
_CLOSERS: Final = {"[": "]", "(": "]", "{": "}"}
_QUOTES: Final = {q: Marks((q, "\\")) for q in ("'", '"', "'" * 3, '"' * 3)}


class PythonicParser(ToolParser):
    """The list begins the text or follows <|python_start|>, and names only the request's tools.

    Nothing is evaluated: literals are rewritten as JSON as they come. Tuples become arrays, keys
    strings, and a word that Python would look up, a string.
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
        self.add("{")
        yield from self._literals()
        return True

    def _literals(self) -> Steps[None]:
        """Reads up to the bracket that ends the call.

        The stack holds how open brackets end in JSON. A comma waits until something follows it.
        """
        stack = ["}"]
        comma = ""
        is_key = True
        while stack:
            yield from self.space()
            if not (yield from self.fill(1)):
                return
            character = self._text[self._at]
            if character in ")]}":
                self.take(self._at + 1)
                self.add(stack.pop())
                comma = ""
                continue
            if character in ",:=":
                self.take(self._at + 1)
                comma = ", " if character == "," else ""
                is_key = character == "," and stack[-1] == "}"
                if character != ",":
                    self.add(": ")
                continue
            self.add(comma)
            comma = ""
            if character in _CLOSERS:
                self.take(self._at + 1)
                self.add("{" if character == "{" else "[")
                stack.append(_CLOSERS[character])
                is_key = character == "{"
            elif character in "'\"":
                yield from self._string()
            else:
                atom = (yield from self.span(_ATOM)) or self.take(self._at + 1)
                self.add(json_string(atom) if is_key else atom_to_json(atom))

    def _string(self) -> Steps[None]:
        """Reads a string and writes it as JSON, as it comes."""
        quote = yield from self.accept(*_QUOTES)
        assert quote is not None
        self.add('"')
        while True:
            mark = yield from self.until(_QUOTES[quote], lambda text: self.add(escape(text)))
            if mark is None:
                return
            if mark == quote:
                self.add('"')
                return
            if not (yield from self.fill(1)):
                return
            letter = self.take(self._at + 1)
            num_digits = {"x": 2, "u": 4, "U": 8}.get(letter, 0)
            yield from self.fill(num_digits)
            digits = self._text[self._at : self._at + num_digits]
            written, num_read = escape_to_json(letter, digits)
            self.take(self._at + num_read)
            self.add(written)
