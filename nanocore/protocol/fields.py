"""Types and limits of messages' fields, and the minor version that each came with.

A limit is stated once, as a JSON Schema annotation: the schema and PROTOCOL.md's tables follow from
it. msgspec checks a `Meta` with ge, le and the like while it decodes. What is `limited` is checked
by `check_limits`, whose errors name value, limit and remedy: by admission for a request, and by the
sampling parameters when they are made.

The decoder (msgspec) names types as Python has them, and not the value: "Expected `int | null`, got
`str` - at `$.max_tokens`" becomes "max_tokens must be an integer, not 'x'".
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec

from nanocore.protocol.errors import InvalidRequestError, quoted, shorten

_LOWS: Final = ("minimum", "exclusiveMinimum", "minLength", "minItems")
_HIGHS: Final = ("maximum", "maxLength", "maxItems")
_LENGTHS: Final = {"minLength", "maxLength", "minItems", "maxItems"}


class _Limit(msgspec.Struct, frozen=True):
    """Limits of a number, or of a str's or list's length. Infinity and NaN are never allowed."""

    field: str
    low: float
    high: float
    exceeds_low: bool
    is_length: bool
    remedy: str

    @property
    def closed(self) -> tuple[float, float]:
        """Inclusive minimum and maximum."""
        low = math.nextafter(self.low, math.inf) if self.exceeds_low else self.low
        return low, min(self.high, sys.float_info.max)

    def refusal(self, value: Any) -> str:
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
    """Check every field that is not None against its limit.

    Raises:
        InvalidRequestError: the first that is out of range.
    """
    for field, is_length, low, high, limit in _limits(type(struct)):
        value = getattr(struct, field)
        if value is not None and not low <= (len(value) if is_length else value) <= high:
            raise InvalidRequestError(limit.refusal(value), field)


def check_types(struct: msgspec.Struct, prefix: str = "") -> None:
    """Check every field's type, as decoding does; structs built in Python are not checked
    otherwise.

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
            field = f"{prefix}{name}"
            raise InvalidRequestError(
                type_problem(error, field, found)
                or f"{field}={shorten(repr(found))} is of the wrong type: {error}"
            ) from None


@functools.cache
def _types(struct: type[msgspec.Struct]) -> list[tuple[str, Any, Any]]:
    """Return (field, type, default), without ranges: `check_limits` explains those better."""
    hints = get_type_hints(struct)
    defaults = {field.name: field.default for field in msgspec.structs.fields(struct)}
    return [(name, kind, defaults.get(name)) for name, kind in hints.items()]


@functools.cache
def _limits(struct: type[msgspec.Struct]) -> list[tuple[str, bool, float, float, _Limit]]:
    """Return (field, is length, minimum, maximum, limit): computed once, used for every request."""
    hints = get_type_hints(struct, include_extras=True)
    limits = [limit for name, hint in hints.items() for limit in _limits_of(name, hint)]
    return [(limit.field, limit.is_length, *limit.closed, limit) for limit in limits]


def _limits_of(name: str, hint: Any) -> Iterator[_Limit]:
    """Yield limits anywhere in an annotation: None may be another choice."""
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


MAX_REQUEST_ID_CHARS: Final = 256
MAX_CACHE_SALT_CHARS: Final = 1024
MAX_STOP_TOKEN_IDS: Final = 128
MAX_NUM_SAMPLES: Final = 128
MAX_LOGIT_BIASES: Final = 1024
MAX_ALLOWED_TOKEN_IDS: Final = 1024
MAX_BAD_WORDS: Final = 256
MAX_BAD_WORDS_TOKENS: Final = 1024
MAX_STRUCTURED_OUTPUTS_BYTES: Final = 136 * 2**10
MAX_CHOICES: Final = 4096
MAX_STRUCTURES: Final = 128
MAX_FREE_PREFIXES: Final = 256
MAX_LENIENT_PARTS: Final = 1024
MAX_PATTERN_SIZE: Final = 1024
"""Each output token is compared with as many: this takes about 4 µs."""
MAX_PATTERN_COUNT: Final = 2**20
"""MAX_PATTERN_SIZE times this many tokens is the largest int32."""
MAX_EXACT_INT: Final = 2**53 - 1
"""The largest integer that every language's numbers hold exactly."""
MAX_INT32: Final = 2**31 - 1


def limited(remedy: str = "", **schema: object) -> msgspec.Meta:
    """Declare a field's limits as JSON Schema keywords.

    remedy: what else an error says.
    """
    return msgspec.Meta(extra_json_schema=schema, extra={"remedy": remedy})


def since(minor: int) -> msgspec.Meta:
    """Declare that a field came with protocol 1.minor; others have been there since 1.0."""
    return msgspec.Meta(extra_json_schema={"since": f"1.{minor}"})


@cache
def minor_versions(struct: type[msgspec.Struct]) -> dict[str, int]:
    """Return the minor versions of a struct's fields that are newer than the struct."""
    hints = get_type_hints(struct, include_extras=True)
    return {name: minor for name, hint in hints.items() for minor in _minor_versions(hint)}


def _minor_versions(hint: Any) -> Iterator[int]:
    for part in get_args(hint):
        if isinstance(part, msgspec.Meta) and "since" in (part.extra_json_schema or {}):
            yield int((part.extra_json_schema or {})["since"].removeprefix("1."))
        else:
            yield from _minor_versions(part)


ExactInt = Annotated[int, msgspec.Meta(ge=0, le=MAX_EXACT_INT)]
Handle = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
RequestId = Annotated[str, limited(minLength=1, maxLength=MAX_REQUEST_ID_CHARS)]
CacheSalt = Annotated[str, limited(minLength=1, maxLength=MAX_CACHE_SALT_CHARS)]
Seed = Annotated[int, limited(minimum=0, maximum=MAX_EXACT_INT)]
Int32Column = Annotated[bytes, limited(column="int32")]
Uint32Column = Annotated[bytes, limited(column="uint32")]
Float32Column = Annotated[bytes, limited(column="float32")]


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
