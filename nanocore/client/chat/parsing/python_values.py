"""Python's literals as JSON. They are parsed by `ast` and read from its tree: nothing is run."""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any, Final

from nanocore.client.chat.parsing.json_reading import json_string

_WORDS: Final = {"true": True, "false": False, "null": None}
_UNREADABLE: Final = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


def python_to_json(text: str) -> str:
    """A literal as JSON; what Python does not read, or JSON does not have, as a string."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that are none
            tree = ast.parse(f"({text}\n)", mode="eval")
        return json.dumps(_value(tree.body), ensure_ascii=False, allow_nan=False)
    except _UNREADABLE:
        return json_string(text.strip())


def _value(node: ast.expr) -> Any:
    """Tuples and sets become lists, keys strings, and what Python would look up, a string."""
    match node:
        case ast.Constant(value=str() as text):
            # Escapes may spell halves of surrogate pairs.
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
