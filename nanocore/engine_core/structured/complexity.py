"""What is refused before llguidance sees it: what it would work on for minutes, or get wrong.

It cannot be interrupted, and its own limits do not cover these.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from math import lcm
from typing import Any, Final

from nanocore.protocol.errors import InvalidRequestError

MAX_REPETITIONS: Final = 1000
"""Of ?, *, + and {} in one expression: what it costs grows with the square."""
MAX_LARK_REPETITIONS: Final = 2500
MAX_LARK_INTERSECTIONS: Final = 64
MAX_MULTIPLE: Final = 100_000
"""Of multipleOf without its decimal point; and of what is a multiple of all that are merged."""


_MERGING: Final = ("allOf", "anyOf", "oneOf", "$ref")


def check_regex(field: str, regex: str) -> None:
    """Refuse an expression that would take minutes, or that llguidance would misread.

    Raises:
        InvalidRequestError: it is empty, ends in half an escape, or has too many repetitions.
    """
    name = f"structured_outputs.{field}"
    if not regex:
        raise InvalidRequestError(f"{name} is empty: an output has text")
    unescaped = re.sub(r"\\.", "", regex, flags=re.DOTALL)
    if unescaped.endswith("\\"):
        raise InvalidRequestError(
            f"{name} at character {len(regex) - 1}: a backslash that escapes nothing: write two"
        )
    count = len(re.findall(r"[?*+{]", unescaped))
    if count > MAX_REPETITIONS:
        raise InvalidRequestError(
            f"{name} has {count} repetitions: at most {MAX_REPETITIONS} are allowed, for it would "
            "take too long; write some as one, such as a{1,100}"
        )


def check_lark(grammar: str) -> None:
    """Refuse a grammar of which the most costly operators are too many.

    Raises:
        InvalidRequestError: which ones, and how many.
    """
    for operators, limit in (("?*+{", MAX_LARK_REPETITIONS), ("&~", MAX_LARK_INTERSECTIONS)):
        count = sum(map(grammar.count, operators))
        if count > limit:
            raise InvalidRequestError(
                f"structured_outputs.grammar has {count} of the characters {operators}: at most "
                f"{limit} are allowed, for it would take too long; make it smaller"
            )


def check_schema(field: str, schema: Any) -> None:
    """Refuse a schema whose patterns or multiples would take minutes, or that could come out wrong.

    Raises:
        InvalidRequestError: and where, as a JSON pointer.
    """
    multiples: list[tuple[str, Decimal]] = []
    is_merged = False
    for place, part in _objects(schema, ""):
        if isinstance(pattern := part.get("pattern"), str) and pattern:
            check_regex(f"{field} at '{place}/pattern'", pattern)
        if isinstance(multiple := part.get("multipleOf"), (int, float)):
            multiples.append((f"{place}/multipleOf", Decimal(str(multiple))))
        _check_min_properties(field, place, part)
        is_merged = is_merged or not part.keys().isdisjoint(_MERGING)
    _check_multiples(field, multiples, is_merged)


def _check_min_properties(field: str, place: str, part: dict[str, Any]) -> None:
    """Names that are free may come twice, and count once when they are read."""
    least, required = part.get("minProperties"), part.get("required")
    num_required = len(required) if isinstance(required, list) else 0
    if not isinstance(least, (int, float)) or least <= max(1, num_required):
        return
    if part.get("additionalProperties", True) is not False or "patternProperties" in part:
        raise InvalidRequestError(
            f"structured_outputs.{field} at '{place}/minProperties': {least} cannot be held where "
            "names are free, for one may come twice: list what is required, or set "
            "additionalProperties to false"
        )


def _check_multiples(field: str, multiples: list[tuple[str, Decimal]], is_merged: bool) -> None:
    """Each alone, and all together if parts of the schema may hold of one value."""
    digits = max((_num_decimals(value) for _, value in multiples), default=0)
    common = 1
    for place, value in multiples:
        try:
            own = int(value.scaleb(_num_decimals(value)))
            common = lcm(common, int(value.scaleb(digits))) if is_merged else own
        except (InvalidOperation, OverflowError):
            own = MAX_MULTIPLE + 1
        if max(own, common) > MAX_MULTIPLE:
            raise InvalidRequestError(
                f"structured_outputs.{field} at {place!r}: multipleOf={value} is too much, alone "
                f"or with the others: without their decimal points, it and what is a multiple of "
                f"all may be {MAX_MULTIPLE} at most; leave it out"
            )


def _num_decimals(value: Decimal) -> int:
    return max(-int(value.normalize().as_tuple().exponent), 0)


def _objects(schema: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) of all objects that a schema holds; its depth is bounded."""
    if isinstance(schema, dict):
        yield place, schema
        for key, value in schema.items():
            if isinstance(value, (dict, list)):
                escaped = key.replace("~", "~0").replace("/", "~1")
                yield from _objects(value, f"{place}/{escaped}")
    elif isinstance(schema, list):
        for i, value in enumerate(schema):
            if isinstance(value, (dict, list)):
                yield from _objects(value, f"{place}/{i}")
