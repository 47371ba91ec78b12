"""What is refused before llguidance sees it: what it would work on for minutes, or get wrong.

It cannot be interrupted, and its own limits do not cover these.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from math import lcm
from typing import Any, Final

from nanocore.engine_core.structured.schema_numbers import MERGING, check_values
from nanocore.engine_core.structured.schema_parts import (
    SchemaError,
    check_references,
    escaped,
    parts,
)
from nanocore.engine_core.structured.schema_patterns import check_pattern
from nanocore.protocol.errors import InvalidRequestError, shorten
from nanocore.protocol.structured_outputs import StructuralTag

MAX_REPETITIONS: Final = 1000
"""Of ?, *, + and {} in one expression: what it costs grows with the square."""
MAX_LARK_REPETITIONS: Final = 2500
MAX_LARK_INTERSECTIONS: Final = 64
MAX_MULTIPLE: Final = 100_000
"""Of multipleOf without its decimal point; and of what is a multiple of all that are merged."""


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
    """Refuse a schema that would take minutes, or let through what it calls invalid.

    Raises:
        SchemaError: and where, as a JSON pointer.
    """
    check_references(field, schema)
    check_values(field, schema)
    multiples: list[tuple[str, Decimal]] = []
    is_merged = False
    for place, part in parts(schema):
        for at, pattern in _patterns(place, part):
            try:
                check_regex(f"{field} at {at!r}", pattern)
                check_pattern(f"{field} at {at!r}", pattern)
            except InvalidRequestError as error:
                raise SchemaError(str(error), at) from None
        if isinstance(multiple := part.get("multipleOf"), (int, float)):
            multiples.append((f"{place}/multipleOf", Decimal(str(multiple))))
        _check_required(field, place, part)
        _check_min_properties(field, place, part)
        is_merged = is_merged or not MERGING.isdisjoint(part)
    _check_multiples(field, multiples, is_merged)


def check_triggers(tag: StructuralTag) -> None:
    """Refuse triggers of which one could appear without beginning a structure.

    Free text ends where a trigger ends: the longer of two that begin alike is never reached.

    Raises:
        InvalidRequestError: one holds another within it.
    """
    for one in tag.triggers:
        within = next((other for other in tag.triggers if one.find(other, 1) > 0), None)
        if within is not None and not one.startswith(within):
            raise InvalidRequestError(
                f"structured_outputs.structural_tag.triggers[{tag.triggers.index(one)}]: "
                f"{shorten(one)!r} holds the trigger {shorten(within)!r} within it, so that it "
                "could appear in free text: take triggers of which none is within another"
            )


def _patterns(place: str, part: dict[str, Any]) -> list[tuple[str, str]]:
    """(JSON pointer, pattern) of a schema's own: of its text and of its names; empty ones match."""
    own = {f"{place}/pattern": part.get("pattern")}
    by_name = part.get("patternProperties")
    for key in by_name if isinstance(by_name, dict) else ():
        own[f"{place}/patternProperties/{escaped(key)}"] = key
    return [(at, one) for at, one in own.items() if isinstance(one, str) and one]


def _check_required(field: str, place: str, part: dict[str, Any]) -> None:
    """A property that says itself that it is required, as in draft 3: nothing here reads that."""
    properties = part.get("properties")
    for name, one in properties.items() if isinstance(properties, dict) else ():
        if isinstance(one, dict) and one.get("required") is True:
            at = f"{place}/properties/{escaped(name)}/required"
            raise SchemaError(
                f"structured_outputs.{field} at {at!r}: true has no effect: list the property's "
                "name in `required` of its object",
                at,
            )


def _check_min_properties(field: str, place: str, part: dict[str, Any]) -> None:
    """Names that are free may come twice, and count once when they are read."""
    least, required = part.get("minProperties"), part.get("required")
    num_required = len(required) if isinstance(required, list) else 0
    if not isinstance(least, (int, float)) or least <= max(1, num_required):
        return
    if part.get("additionalProperties", True) is not False or "patternProperties" in part:
        raise SchemaError(
            f"structured_outputs.{field} at '{place}/minProperties': {least} cannot be held where "
            "names are free, for one may come twice: list what is required, or set "
            "additionalProperties to false",
            f"{place}/minProperties",
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
            raise SchemaError(
                f"structured_outputs.{field} at {place!r}: multipleOf={value} is too much, alone "
                f"or with the others: without their decimal points, it and what is a multiple of "
                f"all may be {MAX_MULTIPLE} at most; leave it out",
                place,
            )


def _num_decimals(value: Decimal) -> int:
    return max(-int(value.normalize().as_tuple().exponent), 0)
