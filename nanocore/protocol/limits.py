"""Holds a struct's fields to the limits in their annotations, in words for whoever gave the values.

`fields.limited` states a limit once: the JSON Schema and the tables of PROTOCOL.md follow from it,
and so does the check here. msgspec's own would name neither the value nor the remedy, and is not
made at all where a struct is built in Python.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints

import msgspec

from nanocore.protocol.errors import InvalidRequestError, shorten

_LOWS: Final = ("minimum", "exclusiveMinimum", "minLength", "minItems")
_HIGHS: Final = ("maximum", "maxLength", "maxItems")
_LENGTHS: Final = {"minLength", "maxLength", "minItems", "maxItems"}


@dataclass(frozen=True, slots=True)
class _Limit:
    """What a number, or a str's or list's length, may be; infinite and NaN it may never be."""

    field: str
    low: float
    high: float
    exceeds_low: bool
    is_length: bool
    remedy: str

    @property
    def closed(self) -> tuple[float, float]:
        """The least and the greatest that are allowed."""
        low = math.nextafter(self.low, math.inf) if self.exceeds_low else self.low
        return low, min(self.high, sys.float_info.max)

    def refusal(self, value: Any) -> str:
        """What, value, limit and remedy."""
        if isinstance(value, str):
            return (
                f"{self.field} has {len(value)} characters: {self.low} to {self.high} are allowed"
            )
        remedy = f"; {self.remedy}" if self.remedy else ""
        if isinstance(value, list):
            least = f"at least {self.low} and " if self.low else ""
            limit = f"{least}at most {self.high}{remedy}"
            return f"len({self.field})={len(value)} is out of range: {limit}"
        interval = f"in {'(' if self.exceeds_low else '['}{self.low}, {self.high}]"
        limit = f"finite and at least {self.low}" if self.high == math.inf else interval
        return f"{self.field}={value!r} is out of range: it must be {limit}{remedy}"


def check_limits(struct: msgspec.Struct) -> None:
    """Hold every field that is not None to its limit, if it has one.

    Raises:
        InvalidRequestError: the first that is out of range.
    """
    for field, is_length, low, high, limit in _limits(type(struct)):
        value = getattr(struct, field)
        if value is not None and not low <= (len(value) if is_length else value) <= high:
            raise InvalidRequestError(limit.refusal(value))


def check_types(struct: msgspec.Struct, prefix: str = "") -> None:
    """Hold every field to its type, as decoding does: a struct built in Python is not looked at.

    prefix: what an error says in front of a field's name.

    Raises:
        InvalidRequestError: the first that is of another type.
    """
    for name, kind, default in _types(type(struct)):
        if (found := getattr(struct, name)) is default:
            continue
        try:
            msgspec.convert(found, kind)
        except msgspec.ValidationError as error:
            value = shorten(repr(found))
            raise InvalidRequestError(
                f"{prefix}{name}={value} is of the wrong type: {error}"
            ) from None


@functools.cache
def _types(struct: type[msgspec.Struct]) -> list[tuple[str, Any, Any]]:
    """(field, type, default): without the ranges, which are checked with words of their own."""
    hints = get_type_hints(struct)
    defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
    return [(name, kind, defaults.get(name)) for name, kind in hints.items()]


@functools.cache
def _limits(struct: type[msgspec.Struct]) -> list[tuple[str, bool, float, float, _Limit]]:
    """(field, whether its length is limited, least, greatest, what says so): for every request."""
    hints = get_type_hints(struct, include_extras=True)
    limits = [limit for name, hint in hints.items() for limit in _limits_of(name, hint)]
    return [(limit.field, limit.is_length, *limit.closed, limit) for limit in limits]


def _limits_of(name: str, hint: Any) -> Iterator[_Limit]:
    """Those stated anywhere in an annotation: None may be another choice."""
    for part in get_args(hint):
        if get_origin(hint) is not Annotated or not isinstance(part, msgspec.Meta):
            yield from _limits_of(name, part)
            continue
        schema = part.extra_json_schema or {}
        if "column" in schema:
            continue  # bytes, whose items admission looks at
        lows = [schema[key] for key in _LOWS if key in schema]
        highs = [schema[key] for key in _HIGHS if key in schema]
        if lows or highs:
            yield _Limit(
                name,
                low=lows[0] if lows else 0,
                high=highs[0] if highs else math.inf,
                exceeds_low="exclusiveMinimum" in schema,
                is_length=bool(schema.keys() & _LENGTHS),
                remedy=(part.extra or {}).get("remedy", ""),
            )
