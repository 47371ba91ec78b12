"""Finds the part of a schema that llguidance refuses, and removes keywords from lenient parts.

Only keywords that the grammar cannot hold are removed. A schema that nothing matches is refused,
lenient or not.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from nanocore.engine_core.grammars.schema import escaped, parts
from nanocore.engine_core.grammars.schema_checks import first_fault
from nanocore.protocol.errors import shorten

_MAX_POINTERS: Final = 64
"""Pointers that are returned; more may be left out."""
_MAX_COMPILATIONS: Final = 100
_MAX_SEARCH_S: Final = 0.1
_OF_NAMES: Final = ("properties", "patternProperties")
_OF_SCHEMAS: Final = ("prefixItems", "anyOf", "allOf", "oneOf", "items", "additionalItems",
                      "additionalProperties", "not")  # fmt: skip
_KEY_OF: Final = (
    ("Invalid type", "type"),
    ("Unknown format", "format"),
    ("regex parse error", "pattern"),
    ("regex parse error", "patternProperties"),
    ("Pointer ", "$ref"),
    ("Resource ", "$ref"),
    ("oneOf ", "oneOf"),
)
_UNIMPLEMENTED: Final = "Unimplemented keys: "


def relax(root: Any, pointers: Sequence[str], refusal: Callable[[Any], str | None]) -> list[str]:
    """Remove from the parts at these pointers, in place, the keywords that a schema is refused for.

    refusal: compiles a schema alone; returns why it is refused, or None.

    Returns:
        JSON pointers of the removed keywords.
    """
    # Each part is compiled alone before the whole: that is quick however many parts there are.
    left_out: list[str] = []
    for pointer in [*pointers, ""]:
        part, alone = at_pointer(root, pointer), root
        if pointer and isinstance(root, dict):
            alone = {**_definitions(root), "$ref": f"#{pointer}"}
        while (blamed := _blamed(pointer, part, alone, refusal)) is not None:
            found = list(_take_out(root, pointers, *blamed))
            if not found:
                break
            left_out += found
    return [shorten(place) for place in left_out[:_MAX_POINTERS]]


def _blamed(
    pointer: str, part: Any, alone: Any, refusal: Callable[[Any], str | None]
) -> tuple[str, str, Sequence[str]] | None:
    """Return the faulty part's JSON pointer, its keyword, and keywords to remove everywhere."""
    if (fault := first_fault(part)) is not None:
        place, _ = fault
        holder = max((at for at, _ in parts(part) if place.startswith(f"{at}/")), key=len)
        return pointer + holder, place[len(holder) + 1 :].split("/")[0], ()
    reason = refusal(alone)
    if reason is None:
        return None
    if reason.startswith(_UNIMPLEMENTED):
        return pointer, "", json.loads(reason.removeprefix(_UNIMPLEMENTED))
    return *find_fault(alone, reason, refusal), ()


def _take_out(
    root: Any, pointers: Sequence[str], place: str, key: str, everywhere: Sequence[str]
) -> Iterator[str]:
    """Remove a keyword, and others of equal value; yield their JSON pointers."""
    blamed = at_pointer(root, place)
    value = blamed.get(key) if isinstance(blamed, dict) and key else None
    for pointer in pointers:
        for at, part in parts(at_pointer(root, pointer), pointer):
            keys = [one for one in everywhere if one in part]
            keys += [key] if value is not None and part.get(key) == value else []
            for one in keys:
                _leave_out(part, one)
                yield f"{at}/{escaped(one)}"


def _leave_out(part: dict[str, Any], key: str) -> None:
    # The part must accept more values than before, never fewer.
    value = part.pop(key)
    if key == "oneOf" and "anyOf" not in part:
        part["anyOf"] = value
    if key in ("properties", "patternProperties", "prefixItems"):  # what it named is not "further"
        part.pop("additionalProperties", None)
        part.pop("items", None)


def find_fault(root: Any, reason: str, refusal: Callable[[Any], str | None]) -> tuple[str, str]:
    """Find the part of a schema that llguidance refuses.

    llguidance names no place. So parts are compiled alone, by halves: those that are refused for
    the same reason lead to the place. The search is bounded and may end at an enclosing part.

    Args:
        reason: why root is refused.
        refusal: compiles a schema alone; returns why it is refused, or None.

    Returns:
        JSON pointer of the part, and the keyword in it or "".
    """
    shared = _definitions(root)
    end_s = time.monotonic() + _MAX_SEARCH_S
    num_left = _MAX_COMPILATIONS

    def is_at_fault(schemas: list[Any]) -> bool:
        nonlocal num_left
        num_left -= 1
        if num_left < 0 or time.monotonic() > end_s:
            return False
        one = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        own = refusal({**shared, **(one if isinstance(one, dict) else {"allOf": [one]})})
        return own is not None and own.partition("\n")[0] == reason.partition("\n")[0]

    pointer, schema, seen = "", root, {""}
    while True:
        found = [part for part in _parts(pointer, schema, root) if part[0] not in seen]
        while len(found) > 1:
            half, rest = found[: len(found) // 2], found[len(found) // 2 :]
            found = half if is_at_fault([schema for _, schema in half]) else rest
        if not found or not is_at_fault([found[0][1]]):
            return pointer, _key(schema, reason)
        pointer, schema = found[0]
        seen.add(pointer)  # a $ref may lead back


def _definitions(root: Any) -> dict[str, Any]:
    names = ("$defs", "definitions", "$schema")
    return {key: root[key] for key in names if key in root} if isinstance(root, dict) else {}


def _parts(place: str, schema: Any, root: Any) -> Iterator[tuple[str, Any]]:
    """Yield (JSON pointer, schema) of the schema's $ref and direct parts, without definitions."""
    if not isinstance(schema, dict):
        return
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found = at_pointer(root, reference[1:])
        if found is not None:
            yield reference[1:], found
    for name in (*_OF_NAMES, *_OF_SCHEMAS):
        value, at = schema.get(name), f"{place}/{name}"
        if isinstance(value, list):
            yield from ((f"{at}/{i}", one) for i, one in enumerate(value))
        elif isinstance(value, dict) and name in _OF_NAMES:
            yield from ((f"{at}/{escaped(key)}", one) for key, one in value.items())
        elif isinstance(value, (dict, bool)):
            yield at, value


def at_pointer(root: Any, pointer: str) -> Any:
    """Return the value that a JSON pointer of a schema leads to, or None."""
    for key in pointer.split("/")[1:]:
        if isinstance(root, dict):
            root = root.get(key.replace("~1", "/").replace("~0", "~"))
        elif isinstance(root, list) and key.isdecimal() and int(key) < len(root):
            root = root[int(key)]
        else:
            return None
    return root


def _key(schema: Any, reason: str) -> str:
    if not isinstance(schema, dict):
        return ""
    named = re.findall(r"'([^']+)'|\"([^\"]+)\"", reason)
    keys = [first or second for first, second in named]
    keys += [key for text, key in _KEY_OF if reason.startswith(text)]
    return next((key for key in keys if key in schema), "")
