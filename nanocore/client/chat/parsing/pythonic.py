"""Tool parser of Llama 3.2 and 4: calls as a Python list, [get_weather(city='Paris'), other()].

Literals are parsed by `ast` and read from its tree: nothing is run.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from nanocore.client.chat.parsing.json_reader import json_string
from nanocore.client.chat.parsing.stream_reader import Marks, Steps
from nanocore.client.chat.parsing.tool_parser import ToolParser
from nanocore.client.chat.tools import Tool

_WORDS: Final = {"true": True, "false": False, "null": None}
_UNREADABLE: Final = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


def python_to_json(text: str) -> str:
    """Return a literal as JSON; as a string if Python cannot read it or JSON cannot represent
    it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes
            tree = ast.parse(f"({text}\n)", mode="eval")
        return json.dumps(_value(tree.body), ensure_ascii=False, allow_nan=False)
    except _UNREADABLE:
        return json_string(text.strip())


def _value(node: ast.expr) -> Any:
    # Tuples and sets become lists; keys and names become strings.
    match node:
        case ast.Constant(value=str() as text):
            # Escapes may produce halves of surrogate pairs.
            return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case ast.JoinedStr(values=[ast.Constant() as only]):
            return _value(only)
        case ast.Constant(value=bytes() as data):
            return data.decode("utf-8", "replace")
        case ast.Constant(value=bool() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {_key(key): _value(v) for key, v in zip(keys, values, strict=True) if key}
        case ast.Name(id=name):
            return _WORDS.get(name, name)
    return ast.unparse(node)


def _key(node: ast.expr) -> str:
    value = _value(node)
    return value if isinstance(value, str) else json.dumps(value)


_NAME: Final = re.compile(r"[A-Za-z0-9_.-]*")
_KEYWORD: Final = re.compile(r"""\s*["']?([A-Za-z0-9_.-]+)["']?\s*[:=](?!=)""")
_QUOTES: Final = {q: Marks((q, "\\")) for q in ("'", '"', "'" * 3, '"' * 3)}
_STRUCTURE: Final = Marks((*_QUOTES, *"()[]{},"))


class PythonicParser(ToolParser):
    """The list begins the text or follows <|python_start|>, and names only the request's tools.

    Nothing is evaluated: see `python_to_json`. An argument is emitted when it is complete. A
    positional argument gets the name of the tool's parameter in its place.
    """

    marks: ClassVar[tuple[str, ...]] = ("<|python_start|>", "<|python_end|>")
    openers: ClassVar[Marks] = Marks(("<|python_start|>",))
    is_bare: ClassVar[bool] = True

    @classmethod
    def beginnings(cls, tools: Sequence[Tool]) -> list[str]:
        return [*cls.openers.texts, *(f"[{one.name}(" for one in tools)]

    def block(self, opener: str) -> Steps[None]:
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
        while (mark := (yield from self.until(_QUOTES[quote], pieces.append))) is not None:
            pieces.append(mark)
            if mark == quote:
                return
            yield from self.fill(1)
            pieces.append(self.take(self._at + 1))
