"""Refuses what llguidance would work on for minutes, or get wrong; its own limits do not cover it.

llguidance cannot be interrupted. It reads numbers as doubles, and takes bounds apart in their
decimal digits. Strings are written without \\u (`grammar_text`), so some characters cannot be
written.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from math import lcm
from typing import Any, Final

from nanocore.engine_core.grammars.schema import (
    Rounded,
    SchemaError,
    check_pattern,
    check_references,
    escaped,
    parts,
)
from nanocore.protocol.errors import InvalidRequestError, quoted, shorten
from nanocore.protocol.structured_outputs import StructuralTag

MAX_NUMBER: Final = 2**53
"""Largest number up to which a double holds every whole number."""
MAX_DIGITS: Final = 15
"""Digits of a bound that is not a whole number."""
MERGING: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef"})
_LOWER: Final = ("minimum", "exclusiveMinimum")
_UPPER: Final = ("maximum", "exclusiveMaximum")
_UNWRITABLE: Final = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_Bound = tuple[Decimal, str, bool]
"""(the bound, its JSON pointer, whether it is exclusive)"""


def check_values(field: str, schema: Any) -> None:
    """Refuse const, enum, bounds and multipleOf that llguidance would change.

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
    """Yield (JSON pointer, value) of all values except arrays and objects."""
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
    """Refuse a whole exclusive bound that would be let in: another bound is less than 1 away.

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
    """Return (bound, JSON pointer, is exclusive); in old drafts a flag makes the plain keyword
    exclusive.
    """
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
        f"{value:f} would be accepted, because it is a whole number and another bound is less than "
        "1 away: exclude one with a fraction, such as 0.001 in place of 0",
    )


def _refusal(field: str, place: str, text: str) -> SchemaError:
    return SchemaError(f"structured_outputs.{field} at {place!r}: {text}", place)


MAX_REPETITIONS: Final = 1000
"""Limit of ?, *, + and {} in one expression, whose cost grows with their square."""
MAX_LARK_REPETITIONS: Final = 2500
MAX_LARK_INTERSECTIONS: Final = 64
MAX_MULTIPLE: Final = 100_000
"""Limit of multipleOf without its decimal point, and of the common multiple of merged ones."""


def check_regex(field: str, regex: str) -> None:
    """Refuse a regular expression that would take minutes, or that llguidance would misread.

    Raises:
        InvalidRequestError: it is empty, ends in half an escape, or has too many repetitions.
    """
    name = f"structured_outputs.{field}"
    if not regex:
        raise InvalidRequestError(f"{name} is empty: an output cannot be empty")
    unescaped = re.sub(r"\\.", "", regex, flags=re.DOTALL)
    if unescaped.endswith("\\"):
        raise InvalidRequestError(
            f"{name} at character {len(regex) - 1}: a backslash that escapes nothing: write two"
        )
    count = len(re.findall(r"[?*+{]", unescaped))
    if count > MAX_REPETITIONS:
        raise InvalidRequestError(
            f"{name} has {count} repetitions: at most {MAX_REPETITIONS} are allowed, because more "
            "would take too long; combine some, as in a{1,100}"
        )


def check_lark(grammar: str) -> None:
    """Refuse a grammar with too many of the most costly operators.

    Raises:
        InvalidRequestError: which ones, and how many.
    """
    for operators, limit in (("?*+{", MAX_LARK_REPETITIONS), ("&~", MAX_LARK_INTERSECTIONS)):
        count = sum(map(grammar.count, operators))
        if count > limit:
            raise InvalidRequestError(
                f"structured_outputs.grammar has {count} of the characters {operators}: at most "
                f"{limit} are allowed, because more would take too long; make it smaller"
            )


def check_schema(field: str, schema: Any) -> None:
    """Refuse a schema that would take minutes, or would accept invalid values.

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


_TYPES: Final = ("array", "boolean", "integer", "null", "number", "object", "string")
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS: Final = ("prefixItems", "anyOf", "allOf", "oneOf")
_ONES: Final = ("additionalProperties", "additionalItems", "not", "contains", "propertyNames",
                "if", "then", "else", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_COUNTS: Final = ("minLength", "maxLength", "minItems", "maxItems", "minProperties",
                  "maxProperties", "minContains", "maxContains")  # fmt: skip
_FORMS: Final[dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "type": (
        f"one of {', '.join(_TYPES)}, or a list of them",
        # "any" is draft 3's, which is a keyword's value that is not supported.
        lambda value: all(
            one in (*_TYPES, "any") for one in (value if isinstance(value, list) else [value])
        ),
    ),
    "items": ("a schema, or a list of them", lambda value: isinstance(value, (dict, bool, list))),
    # A Boolean is draft 3's: see `_check_required`.
    "required": (
        "a list of names",
        lambda value: isinstance(value, bool) or _is_list_of(value, str),
    ),
    "enum": ("a list of values", lambda value: isinstance(value, list)),
    "multipleOf": ("a number above 0", lambda value: _is_number(value) and value > 0),
    "uniqueItems": ("true or false", lambda value: isinstance(value, bool)),
    **dict.fromkeys(_MAPS, ("an object", lambda value: isinstance(value, dict))),
    **dict.fromkeys(_LISTS, ("a list of schemas", lambda value: _is_list_of(value, (dict, bool)))),
    **dict.fromkeys(_ONES, ("a schema", lambda value: isinstance(value, (dict, bool)))),
    **dict.fromkeys(
        _COUNTS,
        (
            "a whole number from 0",
            lambda value: _is_number(value) and value >= 0 and value == int(value),
        ),
    ),
    **dict.fromkeys(("minimum", "maximum"), ("a number", lambda value: _is_number(value))),
    # In draft 4 a Boolean, which belongs to minimum or maximum.
    **dict.fromkeys(
        ("exclusiveMinimum", "exclusiveMaximum"),
        ("a number", lambda value: isinstance(value, (int, float))),
    ),
    **dict.fromkeys(
        ("pattern", "format", "$ref"), ("a string", lambda value: isinstance(value, str))
    ),
}
"""By keyword: what its value is in every draft of JSON Schema, in words and as a test."""


def check_forms(field: str, schema: Any, place: str = "") -> None:
    """Refuse values of keywords that no JSON Schema allows, lenient or not; null is let through.

    Raises:
        InvalidRequestError: where, as a JSON pointer, and what is allowed.
    """
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        at = f"{place}/{escaped(keyword)}"
        if keyword in _FORMS and value is not None:
            form, is_of_form = _FORMS[keyword]
            if not is_of_form(value):
                raise InvalidRequestError(
                    f"structured_outputs.{field} at {at!r}: {quoted(value)} is not {form}"
                )
        if keyword in _MAPS:
            value = value or {}
            for name, one in value.items():
                check_forms(field, one, f"{at}/{escaped(name)}")
        elif keyword in (*_LISTS, "items") and isinstance(value, list):
            for i, one in enumerate(value):
                check_forms(field, one, f"{at}/{i}")
        elif keyword in (*_ONES, "items"):
            check_forms(field, value, at)


def _is_list_of(value: Any, kinds: type | tuple[type, ...]) -> bool:
    return isinstance(value, list) and all(isinstance(one, kinds) for one in value)


def check_triggers(tag: StructuralTag) -> None:
    """Refuse triggers that could appear without beginning a structure.

    Free text ends where a trigger ends: the longer of two that begin alike is never reached.

    Raises:
        InvalidRequestError: one holds another within it.
    """
    for one in tag.triggers:
        within = next((other for other in tag.triggers if one.find(other, 1) > 0), None)
        if within is not None and not one.startswith(within):
            raise InvalidRequestError(
                f"structured_outputs.structural_tag.triggers[{tag.triggers.index(one)}]: "
                f"{shorten(one)!r} contains the trigger {shorten(within)!r}, so it could appear in "
                "free text: use triggers that do not contain each other"
            )


def _patterns(place: str, part: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (JSON pointer, pattern) of a schema's pattern and patternProperties; skip empty
    ones.
    """
    own = {f"{place}/pattern": part.get("pattern")}
    by_name = part.get("patternProperties")
    for key in by_name if isinstance(by_name, dict) else ():
        own[f"{place}/patternProperties/{escaped(key)}"] = key
    return [(at, one) for at, one in own.items() if isinstance(one, str) and one]


def _check_required(field: str, place: str, part: dict[str, Any]) -> None:
    """Refuse draft 3's `required: true` in a property: llguidance would ignore it."""
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
    """Refuse minProperties with free names: a name may come twice, and counts once for a reader."""
    least, required = part.get("minProperties"), part.get("required")
    num_required = len(required) if isinstance(required, list) else 0
    if not isinstance(least, (int, float)) or least <= max(1, num_required):
        return
    if part.get("additionalProperties", True) is not False or "patternProperties" in part:
        raise SchemaError(
            f"structured_outputs.{field} at '{place}/minProperties': {least} cannot be enforced "
            "where names are free, because one may occur twice: list required names, or set "
            "additionalProperties to false",
            f"{place}/minProperties",
        )


def _check_multiples(field: str, multiples: list[tuple[str, Decimal]], is_merged: bool) -> None:
    """Check each multipleOf alone, and all together if parts of the schema may apply to one
    value.
    """
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
                f"structured_outputs.{field} at {place!r}: multipleOf={value} is too large, alone "
                "or with the others: without their decimal points, it and the common multiple of "
                f"all may be at most {MAX_MULTIPLE}; leave it out",
                place,
            )


def _num_decimals(value: Decimal) -> int:
    return max(-int(value.normalize().as_tuple().exponent), 0)
