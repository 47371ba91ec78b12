"""Values and bounds of a JSON Schema that llguidance would hold to be others: they are refused.

It reads numbers as doubles and takes bounds apart in their decimal digits. Strings are written
without \\u (see `grammar_text`), so some characters cannot be written at all.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

from nanocore.engine_core.structured.schema_json import Rounded
from nanocore.engine_core.structured.schema_parts import SchemaError, escaped, parts
from nanocore.protocol.errors import shorten

MAX_NUMBER: Final = 2**53
"""Beyond it a double does not hold each whole number."""
MAX_DIGITS: Final = 15
"""Of a bound that is not written as a whole number."""
MERGING: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef"})
_LOWER: Final = ("minimum", "exclusiveMinimum")
_UPPER: Final = ("maximum", "exclusiveMaximum")
_UNWRITABLE: Final = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_Bound = tuple[Decimal, str, bool]
"""(the bound, its JSON pointer, whether it is exclusive)"""


def check_values(field: str, schema: Any) -> None:
    """Refuse what would be changed in const, enum, bounds and multipleOf.

    Raises:
        SchemaError: and where, as a JSON pointer.
    """
    for place, part in parts(schema):
        for keyword in ("const", "enum"):
            for at, value in _values(part.get(keyword), f"{place}/{keyword}"):
                _check_value(field, at, value)
        for keyword in (*_LOWER, *_UPPER, "multipleOf"):
            bound: Any = part.get(keyword)
            if _is_number(bound):
                _check_number(field, f"{place}/{keyword}", bound)
                if len(_decimal(bound).as_tuple().digits) > MAX_DIGITS and isinstance(bound, float):
                    raise _refusal(
                        field,
                        f"{place}/{keyword}",
                        f"{bound} has more than {MAX_DIGITS} digits, and would be rounded: "
                        "write fewer",
                    )
    _check_exclusive_bounds(field, schema)


def _values(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """(JSON pointer, value) of all that are neither arrays nor objects."""
    if isinstance(value, list):
        for i, one in enumerate(value):
            yield from _values(one, f"{place}/{i}")
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _values(one, f"{place}/{escaped(key)}")
    else:
        yield place, value


def _check_value(field: str, place: str, value: Any) -> None:
    if _is_number(value):
        _check_number(field, place, value)
    elif isinstance(value, str) and (found := _UNWRITABLE.search(value)):
        raise _refusal(
            field,
            place,
            f"the control character {found[0]!a} cannot be written: leave it out, or allow any "
            "string",
        )


def _check_number(field: str, place: str, value: float) -> None:
    if abs(value) > MAX_NUMBER:
        raise _refusal(
            field,
            place,
            f"{shorten(str(value))} is beyond 2^53 = {MAX_NUMBER}, where numbers are not exact: "
            "ask for less, or make it a string",
        )
    if isinstance(value, Rounded):
        raise _refusal(
            field,
            place,
            f"it has more digits than a number holds, and would be {value!r}: write fewer, or make "
            "it a string",
        )


def _check_exclusive_bounds(field: str, schema: Any) -> None:
    """One that is a whole number would be let in where the other bound is less than 1 away.

    Where parts of the schema may hold of one value, bounds of all of them are looked at together.
    """
    together: tuple[list[_Bound], list[_Bound]] = ([], [])
    is_merged = any(not MERGING.isdisjoint(part) for _, part in parts(schema))
    for place, part in parts(schema):
        if not _may_be_a_fraction(part):
            continue
        own = _bounds(place, part, _LOWER), _bounds(place, part, _UPPER)
        for bounds, more in zip(together, own, strict=True):
            bounds += more
        if not is_merged:
            _check_pairs(field, *own)
    if is_merged:
        _check_pairs(field, *together)


def _check_pairs(field: str, lower: list[_Bound], upper: list[_Bound]) -> None:
    lowest, highest = sorted(one[0] for one in lower), sorted(one[0] for one in upper)
    for value, place, is_exclusive in lower:
        if is_exclusive and bisect_left(highest, value) < bisect_left(highest, value + 1):
            raise _too_close(field, place, value)
    for value, place, is_exclusive in upper:
        if is_exclusive and bisect_right(lowest, value - 1) < bisect_right(lowest, value):
            raise _too_close(field, place, value)


def _bounds(place: str, part: dict[str, Any], keywords: tuple[str, str]) -> list[_Bound]:
    """Only whole numbers count as exclusive; in old drafts a flag makes the other keyword so."""
    plain, exclusive = keywords
    return [
        (value, f"{place}/{keyword}", value % 1 == 0 and flag)
        for keyword, flag in ((plain, part.get(exclusive) is True), (exclusive, True))
        if _is_number(part.get(keyword))
        for value in [_decimal(part[keyword])]
    ]


def _may_be_a_fraction(part: dict[str, Any]) -> bool:
    types = part.get("type", "number")
    return "number" in (types if isinstance(types, list) else [types])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _decimal(value: float) -> Decimal:
    return Decimal(str(value)).normalize()


def _too_close(field: str, place: str, value: Decimal) -> SchemaError:
    return _refusal(
        field,
        place,
        f"{value:f} would be let in, for it is a whole number and another bound is less than 1 "
        "away: exclude one with a fraction, such as 0.001 in place of 0",
    )


def _refusal(field: str, place: str, text: str) -> SchemaError:
    return SchemaError(f"structured_outputs.{field} at {place!r}: {text}", place)
