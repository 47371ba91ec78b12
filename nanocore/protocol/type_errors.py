"""What is wrong with a value, for people: the decoder's errors with the field, and what it holds.

The decoder (msgspec) names types as Python has them, and not the value: "Expected `int | null`, got
`str` - at `$.max_tokens`" becomes "max_tokens must be an integer, not 'x'".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec

from nanocore.protocol.errors import quoted

_EXPECTED: Final = re.compile(r"Expected `([a-z |]+)`, got `\w+`")
_RANGE: Final = re.compile(r"Expected `(int|float)` ([<>]=?) (\S+)")
_MISSING: Final = re.compile(r"Object missing required field `(\w+)`")
_CHOICE: Final = re.compile(r"Invalid enum value ")
_PATH: Final = re.compile(r" - at `\$\.?([^`]*)`$")
_STEP: Final = re.compile(r"(\w+)|\[(\d+)\]")
_KINDS: Final = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


def field_error(
    error: msgspec.ValidationError, value: object, kind: type[msgspec.Struct] | None = None
) -> tuple[str | None, str]:
    """Return the path of the field at fault, e.g. `messages[0].role`, and what is wrong with it.

    value: what was decoded. kind: as what; fields that are one of some texts are then listed.
    """
    text, path = _split(error)
    if missing := _MISSING.fullmatch(text):
        path = f"{path}.{missing[1]}" if path else missing[1]
        return path, f"{path} is missing"
    if path and (problem := wrong_type(text, path, _found(value, path))):
        return path, problem
    if _CHOICE.match(text) and kind is not None and path in kind.__struct_fields__:
        choices = ", ".join(dict.fromkeys(_choices(get_type_hints(kind)[path])))
        return path, f"{path} must be one of {choices}, not {quoted(_found(value, path))}"
    return path or None, str(error)


def type_problem(error: msgspec.ValidationError, field: str, value: object) -> str | None:
    """Return what is wrong with a field's value or a part of it, if the error tells its type."""
    text, path = _split(error)
    place = field + (path if path.startswith("[") or not path else f".{path}")
    return wrong_type(text, place, _found(value, path))


def wrong_type(text: str, field: str, value: object) -> str | None:
    """Return what is wrong with a field's value, if the decoder's text tells its type."""
    if limit := _RANGE.fullmatch(text):
        return f"{field} must be {_KINDS[limit[1]]} {limit[2]} {limit[3]}, not {quoted(value)}"
    if not (expected := _EXPECTED.fullmatch(text)):
        return None
    names = [name for name in expected[1].split(" | ") if name != "null"]
    *first, last = " or ".join(_KINDS.get(name, name) for name in names).split(" or ")
    allowed = f"{', '.join(first)} or {last}" if first else last
    found = "" if "[...]" in field else f", not {quoted(value)}"  # which value is not known
    return f"{field} must be {allowed}{found}"


def _split(error: msgspec.ValidationError) -> tuple[str, str]:
    """Return the decoder's text without the path, and the path; "" if it names none."""
    text = str(error)
    at = _PATH.search(text)
    return (text[: at.start()], at[1]) if at else (text, "")


def _found(value: Any, path: str) -> object:
    """Return the value at a path. Keys of free-form objects are `...` in it: what is there is then
    unknown, and the last value on the way is returned."""
    for name, index in _STEP.findall(path):
        try:
            value = value[name or int(index)]
        except (KeyError, IndexError, TypeError):
            break
    return value


def _choices(hint: object) -> Iterator[str]:
    """Yield the texts of all Literals in an annotation."""
    for part in get_args(hint):
        if get_origin(hint) is Literal:
            yield str(part)
        else:
            yield from _choices(part)


def json_kind(value: object) -> str:
    """Return what a decoded JSON value is: "null", "an object"."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    return "null" if value is None else kinds.get(type(value), "a number")
