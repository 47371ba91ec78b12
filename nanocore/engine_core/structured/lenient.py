"""Lenient parts of a schema lose the keywords that the grammar lacks, and nothing else.

What is said wrongly, so that nothing matches, is refused there as everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from nanocore.engine_core.structured.complexity import check_schema
from nanocore.engine_core.structured.places import at_pointer, place_in_schema
from nanocore.engine_core.structured.schema_parts import SchemaError, escaped, parts
from nanocore.protocol.errors import shorten

MAX_TOLD: Final = 64
"""Pointers that are returned; more may be left out."""
_UNIMPLEMENTED: Final = "Unimplemented keys: "


def relax(root: Any, pointers: Sequence[str], refusal: Callable[[Any], str | None]) -> list[str]:
    """Take out of these parts of a schema, in place, what it is refused for.

    Each part is looked at alone first: that is quick, however many there are.

    refusal: why a schema is refused, compiled alone; None if it is not.

    Returns:
        JSON pointers of the keywords that were taken out.
    """
    left_out: list[str] = []
    for pointer in [*pointers, ""]:
        part, alone = at_pointer(root, pointer), root
        if pointer and isinstance(root, dict):
            shared = {key: root[key] for key in ("$defs", "definitions", "$schema") if key in root}
            alone = {**shared, "$ref": f"#{pointer}"}
        while (blamed := _blamed(pointer, part, alone, refusal)) is not None:
            found = list(_take_out(root, pointers, *blamed))
            if not found:
                break
            left_out += found
    return [shorten(place) for place in left_out[:MAX_TOLD]]


def _blamed(
    pointer: str, part: Any, alone: Any, refusal: Callable[[Any], str | None]
) -> tuple[str, str, Sequence[str]] | None:
    """(JSON pointer of a part, its keyword to blame, keywords to take out wherever they are)"""
    try:
        check_schema("json", part)
    except SchemaError as error:
        holder = max((at for at, _ in parts(part) if error.place.startswith(f"{at}/")), key=len)
        key = error.place[len(holder) + 1 :].split("/")[0]
        return pointer + holder, key, ()
    reason = refusal(alone)
    if reason is None:
        return None
    if reason.startswith(_UNIMPLEMENTED):
        return pointer, "", json.loads(reason.removeprefix(_UNIMPLEMENTED))
    return *place_in_schema(alone, reason, refusal), ()


def _take_out(
    root: Any, pointers: Sequence[str], place: str, key: str, everywhere: Sequence[str]
) -> Iterator[str]:
    """Take out a keyword, and those that are equal to it; yields where they were."""
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
    """Let a part hold for more values, and for none less."""
    value = part.pop(key)
    if key == "oneOf" and "anyOf" not in part:
        part["anyOf"] = value
    if key in ("properties", "patternProperties", "prefixItems"):  # what it named is not "further"
        part.pop("additionalProperties", None)
        part.pop("items", None)
