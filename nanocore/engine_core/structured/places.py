"""Where in a schema, an expression or a grammar the trouble is, for llguidance does not always say.

A schema is searched by compiling parts of it: those that are refused for the same reason lead to
the place. The search is bounded, and may end at a place around the true one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from nanocore.engine_core.structured.schema_parts import escaped
from nanocore.protocol.errors import shorten

MAX_TRIALS: Final = 100
MAX_SEARCH_S: Final = 0.1
_OF_NAMES: Final = ("properties", "patternProperties")
_OF_LISTS: Final = ("prefixItems", "anyOf", "allOf", "oneOf", "items")
_OF_ONE: Final = ("items", "additionalItems", "additionalProperties", "not")
_KEY_OF: Final = (
    ("Invalid type", "type"),
    ("Unknown format", "format"),
    ("regex parse error", "pattern"),
    ("regex parse error", "patternProperties"),
    ("Pointer ", "$ref"),
    ("Resource ", "$ref"),
    ("oneOf ", "oneOf"),
)
Part = tuple[str, Any]
"""(JSON pointer, the schema there)"""


def place_in_schema(
    root: Any, reason: str, refusal: Callable[[Any], str | None]
) -> tuple[str, str]:
    """(JSON pointer of the part that a schema is refused for, the keyword there or "").

    refusal: why a schema is refused, compiled alone; None if it is not.
    """
    search = _Search(root, reason, refusal)
    place, schema = "", root
    while (part := search.deeper(place, schema)) is not None:
        place, schema = part
    return place, _key(schema, reason)


class _Search:
    """For the part that is refused for the same reason."""

    def __init__(self, root: Any, reason: str, refusal: Callable[[Any], str | None]) -> None:
        self._root = root
        self._reason = _first_line(reason)
        self._refusal = refusal
        self._trials_left = MAX_TRIALS
        self._end = time.monotonic() + MAX_SEARCH_S
        self._seen: set[str] = {""}

    def deeper(self, place: str, schema: Any) -> Part | None:
        """A part of this schema that is to blame, if one is; halves are tried, then theirs."""
        parts = [part for part in _parts(place, schema, self._root) if part[0] not in self._seen]
        while len(parts) > 1:
            half = parts[: len(parts) // 2]
            rest = parts[len(half) :]
            parts = half if self._is_to_blame([schema for _, schema in half]) else rest
        if not parts or not self._is_to_blame([parts[0][1]]):
            return None
        self._seen.add(parts[0][0])
        return parts[0]

    def _is_to_blame(self, schemas: list[Any]) -> bool:
        if not self._trials_left or time.monotonic() > self._end:
            return False
        self._trials_left -= 1
        one = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        if not isinstance(one, dict):
            one = {"allOf": [one]}
        root = self._root if isinstance(self._root, dict) else {}
        shared = {key: root[key] for key in ("$defs", "definitions", "$schema") if key in root}
        refusal = self._refusal({**shared, **one})
        return refusal is not None and _first_line(refusal) == self._reason


def _parts(place: str, schema: Any, root: Any) -> Iterator[Part]:
    """The schema that one refers to, and those directly within it, but for definitions."""
    if not isinstance(schema, dict):
        return
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found = at_pointer(root, reference[1:])
        if found is not None:
            yield reference[1:], found
    for name in _OF_NAMES:
        if isinstance(schema.get(name), dict):
            for key, one in schema[name].items():
                yield f"{place}/{name}/{escaped(key)}", one
    for name in _OF_LISTS:
        if isinstance(schema.get(name), list):
            for i, one in enumerate(schema[name]):
                yield f"{place}/{name}/{i}", one
    for name in _OF_ONE:
        if isinstance(schema.get(name), (dict, bool)):
            yield f"{place}/{name}", schema[name]


def at_pointer(root: Any, pointer: str) -> Any:
    """What a JSON pointer of a schema leads to; None if to nothing."""
    for key in pointer.split("/")[1:]:
        if isinstance(root, dict):
            root = root.get(key.replace("~1", "/").replace("~0", "~"))
        elif isinstance(root, list) and key.isdecimal() and int(key) < len(root):
            root = root[int(key)]
        else:
            return None
    return root


def _key(schema: Any, reason: str) -> str:
    """The key of a schema that a reason is about; "" if it names none."""
    if not isinstance(schema, dict):
        return ""
    named = re.findall(r"'([^']+)'|\"([^\"]+)\"", reason)
    keys = [first or second for first, second in named]
    keys += [key for text, key in _KEY_OF if reason.startswith(text)]
    return next((key for key in keys if key in schema), "")


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def in_lark(reason: str) -> str:
    """llguidance's reason, with line and column in words."""
    match = re.match(r"(?:at )?(\d+)\((\d+)\): (.*)", reason, flags=re.DOTALL)
    if match is None:
        return _without_excerpt(reason)
    expression = _regex_reason(match[3])
    text = f"invalid regex: {expression[0]}" if expression else _without_excerpt(match[3])
    return f"at line {match[1]}, column {match[2]}: {text}"


def in_regex(regex: str, reason: str) -> str:
    """llguidance's reason, with the position in the expression, from 0."""
    expression = _regex_reason(reason)
    if expression is None:
        without = re.sub(r"^(?:at )?\d+\(\d+\): (invalid regex .*? \(in regex\): )?", "", reason)
        return _without_excerpt(without)
    text, shown, column = expression
    i = j = 0
    while j < column and i < len(regex):  # what is shown has some characters escaped
        j += 1 if shown[j : j + 1] == regex[i] else 2
        i += 1
    return f"at character {i}: {text}"


def _regex_reason(reason: str) -> tuple[str, str, int] | None:
    """(what is wrong, the expression as it is shown, the column there) of a regex parse error."""
    match = re.search(r"regex parse error:\n    (.*)\n    ( *)\^+.*?\nerror: ([^\n]*)", reason)
    return None if match is None else (match[3], match[1], len(match[2]))


def _without_excerpt(reason: str) -> str:
    """The reason alone: what follows shows the grammar, which its sender has."""
    return shorten(_first_line(reason))
