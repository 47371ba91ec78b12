"""Tool parsers of formats that write calls as JSON (Hermes, Llama 3, Mistral, DeepSeek) or Python.

Llama 3.2 and 4, and LFM2, write a Python list, [get_weather(city='Paris'), other()]. Its literals
are parsed by `ast` and read from its tree: nothing is run.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar, Final

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


_KEYWORD: Final = re.compile(r"""\s*["']?([A-Za-z0-9_.-]+)["']?\s*[:=](?!=)""")
_QUOTES: Final = {q: Marks((q, "\\")) for q in ("'", '"', "'" * 3, '"' * 3)}
_STRUCTURE: Final = Marks((*_QUOTES, *"()[]{},"))


class PythonicParser(ToolParser):
    """The list begins the text or follows <|python_start|>, and names only the request's tools.

    Nothing is evaluated: see `python_to_json`. An argument is emitted when it is complete. A
    positional argument gets the name of the tool's parameter in its place. After the mark the list
    may be JSON: LFM2 writes that if the prompt asks for it.
    """

    marks: ClassVar[tuple[str, ...]] = ("<|python_start|>", "<|python_end|>")
    openers: ClassVar[Marks] = Marks(marks[:1])
    is_bare: ClassVar[bool] = True

    @classmethod
    def beginnings(cls, tools: Sequence[Tool]) -> list[str]:
        return [*cls.openers.texts, *(f"[{one.name}(" for one in tools)]

    def block(self, opener: str) -> Steps[None]:
        yield from self.space()
        if not (yield from self.accept("[")):
            return
        yield from self.space()
        is_json = opener and (yield from self.sees("{"))
        if is_json:
            yield from self.call_array()
        while not is_json and (yield from self._call()):
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
            yield from self.accept(self.marks[1])

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


class Lfm2Parser(PythonicParser):
    """PythonicParser with LFM2's marks."""

    marks: ClassVar[tuple[str, ...]] = ("<|tool_call_start|>", "<|tool_call_end|>")
    openers: ClassVar[Marks] = Marks(marks[:1])
