"""Refuses what llguidance would work on for minutes, or get wrong; its own limits do not cover it.

llguidance cannot be interrupted. It reads numbers as doubles, and takes bounds apart in their
decimal digits. Strings are written without \\u (`grammar_text`), so some characters cannot be
written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from math import ceil, floor, lcm
from typing import Any, Final
from urllib.parse import unquote

from nanocore.engine_core.grammars.schema import BY_NAME, VALUES, Rounded, escaped, parts
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
_VERBOSE: Final = re.compile(r"\(\?[A-Za-z-]*x[A-Za-z-]*[:)]")
"""Verbose patterns: in their comments brackets could not be told from sets."""
Fault = tuple[str, str]
"""(JSON pointer of the keyword or value to blame, the rest of the sentence about it)"""
_Bound = tuple[Decimal, str, bool]
"""(the bound, its JSON pointer, whether it is exclusive)"""


def check_schema(field: str, schema: Any) -> None:
    """Refuse a schema that would take minutes, or would accept invalid values.

    Raises:
        InvalidRequestError: and where, as a JSON pointer.
    """
    fault = first_fault(schema)
    if fault is not None:
        raise InvalidRequestError(f"structured_outputs.{field} at {fault[0]!r}{fault[1]}")


def first_fault(schema: Any) -> Fault | None:
    """Return why a schema is refused, or None."""
    return next(_faults(schema), None)


def _faults(schema: Any) -> Iterator[Fault]:
    every = list(parts(schema))
    for place, part in every:
        yield from _reference_faults(place, part)
        yield from _value_faults(place, part)
        yield from _pattern_faults(place, part)
        yield from _required_faults(place, part)
        yield from _min_properties_faults(place, part)
    # Parts that may hold of one value are looked at together.
    is_merged = any(not MERGING.isdisjoint(part) for _, part in every)
    for group in [every] if is_merged else [[one] for one in every]:
        yield from _bound_faults(group)
    yield from _multiple_faults(every, is_merged)


def _reference_faults(place: str, part: dict[str, Any]) -> Iterator[Fault]:
    """References to values, which `parts` does not visit."""
    for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
        reference = part.get(keyword)
        if isinstance(reference, str) and not _leads_to_a_part(reference):
            yield (
                f"{place}/{keyword}",
                f": {shorten(reference)} points to a value, or to a map of schemas: put the "
                "schema into $defs",
            )


def _leads_to_a_part(reference: str) -> bool:
    by_name = False
    for key in unquote(reference.partition("#")[2]).split("/")[1:]:
        if not by_name and key in VALUES:
            return False
        by_name = not by_name and key in BY_NAME
    return not by_name


def _value_faults(place: str, part: dict[str, Any]) -> Iterator[Fault]:
    """Const, enum, bounds and multipleOf that llguidance would change."""
    for keyword in ("const", "enum"):
        for at, value in _values(part.get(keyword), f"{place}/{keyword}"):
            if _is_number(value):
                yield from _number_faults(at, value)
            elif isinstance(value, str) and (found := _UNWRITABLE.search(value)):
                yield (
                    at,
                    f": the control character {found[0]!a} cannot be written: leave it out, or "
                    "allow any string",
                )
    for keyword in (*_LOWER, *_UPPER, "multipleOf"):
        bound: Any = part.get(keyword)
        if _is_number(bound):
            at = f"{place}/{keyword}"
            yield from _number_faults(at, bound)
            if len(_decimal(bound).as_tuple().digits) > MAX_DIGITS and isinstance(bound, float):
                yield (
                    at,
                    f": {bound} has more than {MAX_DIGITS} digits, and would be rounded: write "
                    "fewer",
                )


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


def _number_faults(place: str, value: float) -> Iterator[Fault]:
    if abs(value) > MAX_NUMBER:
        yield (
            place,
            f": {shorten(str(value))} is beyond 2^53 = {MAX_NUMBER}, where numbers are not exact: "
            "ask for less, or make it a string",
        )
    if isinstance(value, Rounded):
        yield (
            place,
            f": it has more digits than a number holds, and would be {value!r}: write fewer, or "
            "make it a string",
        )


def _bound_faults(group: list[tuple[str, dict[str, Any]]]) -> Iterator[Fault]:
    """Whole exclusive bounds that would be let in: an opposite bound is less than 1 away."""
    numbers = [(place, part) for place, part in group if _may_be_a_fraction(part)]
    lower, upper = _bounds(numbers, _LOWER), _bounds(numbers, _UPPER)
    above_lower = {ceil(value) for value, _, _ in lower}
    below_upper = {floor(value) for value, _, _ in upper}
    for bounds, near in ((lower, below_upper), (upper, above_lower)):
        for value, place, is_exclusive in bounds:
            if is_exclusive and value in near:
                yield (
                    place,
                    f": {value:f} would be accepted, because it is a whole number and another "
                    "bound is less than 1 away: exclude one with a fraction, such as 0.001 in "
                    "place of 0",
                )


def _bounds(numbers: list[tuple[str, dict[str, Any]]], keywords: tuple[str, str]) -> list[_Bound]:
    """Return bounds; in old drafts a flag makes the plain keyword exclusive."""
    plain, exclusive = keywords
    return [
        (_decimal(part[keyword]), f"{place}/{keyword}", is_exclusive)
        for place, part in numbers
        for keyword, is_exclusive in ((plain, part.get(exclusive) is True), (exclusive, True))
        if _is_number(part.get(keyword))
    ]


def _may_be_a_fraction(part: dict[str, Any]) -> bool:
    types = part.get("type", "number")
    return "number" in (types if isinstance(types, list) else [types])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _decimal(value: float) -> Decimal:
    return Decimal(str(value)).normalize()


MAX_REPETITIONS: Final = 1000
"""Limit of ?, *, + and {} in one expression, whose cost grows with their square."""
MAX_MULTIPLE: Final = 100_000
"""Limit of multipleOf without its decimal point, and of the common multiple of merged ones."""


def check_regex(regex: str) -> None:
    """Refuse a regular expression that would take minutes, or that llguidance would misread.

    Raises:
        InvalidRequestError: it is empty, ends in half an escape, or has too many repetitions.
    """
    for reason in _regex_faults(regex):
        raise InvalidRequestError(f"structured_outputs.regex{reason}")


def _regex_faults(regex: str) -> Iterator[str]:
    if not regex:
        yield " is empty: an output cannot be empty"
    unescaped = re.sub(r"\\.", "", regex, flags=re.DOTALL)
    if unescaped.endswith("\\"):
        yield f" at character {len(regex) - 1}: a backslash that escapes nothing: write two"
    count = len(re.findall(r"[?*+{]", unescaped))
    if count > MAX_REPETITIONS:
        yield (
            f" has {count} repetitions: at most {MAX_REPETITIONS} are allowed, because more would "
            "take too long; combine some, as in a{1,100}"
        )


_TYPES: Final = ("array", "boolean", "integer", "null", "number", "object", "string")
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS: Final = ("prefixItems", "anyOf", "allOf", "oneOf")
_ONES: Final = ("additionalProperties", "additionalItems", "not", "contains", "propertyNames",
                "if", "then", "else", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_COUNTS: Final = ("minLength", "maxLength", "minItems", "maxItems", "minProperties",
                  "maxProperties", "minContains", "maxContains")  # fmt: skip
_Test = Callable[[Any], bool]


def _is(*kinds: type) -> _Test:
    return lambda value: isinstance(value, kinds)


def _is_list_of(*kinds: type) -> _Test:
    return lambda value: isinstance(value, list) and all(isinstance(one, kinds) for one in value)


def _is_type(value: Any) -> bool:
    # "any" is draft 3's, which is a keyword's value that is not supported.
    return all(one in (*_TYPES, "any") for one in (value if isinstance(value, list) else [value]))


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


_FORMS: Final[dict[str, tuple[str, _Test]]] = {
    "type": (f"one of {', '.join(_TYPES)}, or a list of them", _is_type),
    "items": ("a schema, or a list of them", _is(dict, bool, list)),
    # A Boolean is draft 3's: see `_required_faults`.
    "required": ("a list of names", lambda value: _is(bool)(value) or _is_list_of(str)(value)),
    "enum": ("a list of values", _is(list)),
    "multipleOf": ("a number above 0", lambda value: _is_number(value) and value > 0),
    "uniqueItems": ("true or false", _is(bool)),
    **dict.fromkeys(_MAPS, ("an object", _is(dict))),
    **dict.fromkeys(_LISTS, ("a list of schemas", _is_list_of(dict, bool))),
    **dict.fromkeys(_ONES, ("a schema", _is(dict, bool))),
    **dict.fromkeys(_COUNTS, ("a whole number from 0", _is_count)),
    **dict.fromkeys(("minimum", "maximum"), ("a number", _is_number)),
    # In draft 4 a Boolean, which belongs to minimum or maximum.
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), ("a number", _is(int, float))),
    **dict.fromkeys(("pattern", "format", "$ref"), ("a string", _is(str))),
}
"""By keyword: what its value is in every draft of JSON Schema, in words and as a test."""


def check_forms(field: str, schema: Any) -> None:
    """Refuse values of keywords that no JSON Schema allows, lenient or not; null is let through.

    Raises:
        InvalidRequestError: where, as a JSON pointer, and what is allowed.
    """
    for place, part in parts(schema, keywords=(*_LISTS, *_ONES, "items")):
        for keyword, value in part.items():
            if keyword not in _FORMS or value is None:
                continue
            form, is_of_form = _FORMS[keyword]
            if not is_of_form(value):
                at = f"{place}/{escaped(keyword)}"
                raise InvalidRequestError(
                    f"structured_outputs.{field} at {at!r}: {quoted(value)} is not {form}"
                )


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


def _pattern_faults(place: str, part: dict[str, Any]) -> Iterator[Fault]:
    own = {f"{place}/pattern": part.get("pattern")}
    by_name = part.get("patternProperties")
    for key in by_name if isinstance(by_name, dict) else ():
        own[f"{place}/patternProperties/{escaped(key)}"] = key
    for at, pattern in own.items():
        if isinstance(pattern, str) and pattern:
            yield from ((at, reason) for reason in _regex_faults(pattern))
            if _VERBOSE.search(pattern):
                yield at, ": the flag x is not supported: write it without"


def _required_faults(place: str, part: dict[str, Any]) -> Iterator[Fault]:
    """Draft 3's `required: true` in a property: llguidance would ignore it."""
    properties = part.get("properties")
    for name, one in properties.items() if isinstance(properties, dict) else ():
        if isinstance(one, dict) and one.get("required") is True:
            yield (
                f"{place}/properties/{escaped(name)}/required",
                ": true has no effect: list the property's name in `required` of its object",
            )


def _min_properties_faults(place: str, part: dict[str, Any]) -> Iterator[Fault]:
    """Counts of properties with free names: a name may come twice, and counts once for a reader."""
    least, required = part.get("minProperties"), part.get("required")
    num_required = len(required) if isinstance(required, list) else 0
    if not isinstance(least, (int, float)) or least <= max(1, num_required):
        return
    if part.get("additionalProperties", True) is not False or "patternProperties" in part:
        yield (
            f"{place}/minProperties",
            f": {least} cannot be enforced where names are free, because one may occur twice: list "
            "required names, or set additionalProperties to false",
        )


def _multiple_faults(every: list[tuple[str, dict[str, Any]]], is_merged: bool) -> Iterator[Fault]:
    """Check each multipleOf alone, and all together if parts may apply to one value."""
    multiples = [
        (f"{place}/multipleOf", _decimal(part["multipleOf"]))
        for place, part in every
        if _is_number(part.get("multipleOf"))
    ]
    digits = max((_num_decimals(value) for _, value in multiples), default=0)
    common = 1
    for place, value in multiples:
        own = int(value.scaleb(_num_decimals(value)))
        common = lcm(common, int(value.scaleb(digits))) if is_merged else own
        if max(own, common) > MAX_MULTIPLE:
            yield (
                place,
                f": multipleOf={value} is too large, alone or with the others: without their "
                f"decimal points, it and the common multiple of all may be at most {MAX_MULTIPLE}; "
                "leave it out",
            )


def _num_decimals(value: Decimal) -> int:
    return max(-int(value.normalize().as_tuple().exponent), 0)
