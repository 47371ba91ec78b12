"""JSON Schemas: parsing, finding the schemas within a schema, and safe patterns.

Depth is checked before anything recursive runs. An unknown keyword may hold schemas, because a $ref
may lead there. A $ref into a value, or to a map of schemas, is refused: nothing is compiled that
was not checked.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Collection, Iterator
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from nanocore.protocol.errors import InvalidRequestError, shorten

MAX_SCHEMA_DEPTH: Final = 64
"""Nesting of arrays and objects."""


class Rounded(float):
    """A number that was written with more digits than a double holds."""


def parse_schema(field: str, text: str) -> Any:
    """Parse the text of a JSON Schema.

    field: what it is called within structured_outputs.

    Raises:
        InvalidRequestError: it is no JSON, which says line and column, or too deep.
    """
    name = f"structured_outputs.{field}"
    _check_depth(name, text)
    try:
        return json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_int
        )
    except json.JSONDecodeError as error:
        raise InvalidRequestError(
            f"{name} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except ValueError as error:
        raise InvalidRequestError(f"{name} is not JSON: {error}") from None


def _check_depth(name: str, text: str) -> None:
    if text.count("[") + text.count("{") <= MAX_SCHEMA_DEPTH:
        return
    depth = 0
    for match in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', text, flags=re.DOTALL):
        mark = match[0]
        if mark in ("[", "{"):
            depth += 1
            if depth > MAX_SCHEMA_DEPTH:
                line = text.count("\n", 0, match.start()) + 1
                column = match.start() - text.rfind("\n", 0, match.start())
                raise InvalidRequestError(
                    f"{name} has more than {MAX_SCHEMA_DEPTH} arrays and objects in one another, "
                    f"at line {line}, column {column}: nest it less, with $defs and $ref"
                )
        elif mark in ("]", "}"):
            depth -= 1


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number: leave it out")


def _int(text: str) -> int:
    _finite(text)
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {shorten(text)} is too large: the largest is 1.8e308")
    try:
        is_exact = Decimal(text) == Decimal(repr(number))
    except InvalidOperation:  # an exponent beyond what Decimal has
        is_exact = False
    return number if is_exact else Rounded(number)


_WITHOUT_CONTROLS: Final = r"--[\x00-\x08\x0e-\x1f]]"
_TOKEN: Final = re.compile(
    r"\\(?:[xuUpP]\{[^}]*\}|x\w{2}|u\w{4}|U\w{8}|[pP]\w|.)|\[\^?\]?|.", re.DOTALL
)
"""An escape, the start of a set, or a character. A bracket that comes first closes no set."""
_HARMLESS: Final = re.compile(r"\[(?:[^\x00-\x1f\[\\^]|\\[-dws.$()*+?/\[\]\\^{|}])*\]")
"""Sets that can hold no control characters other than white space."""


def with_safe_patterns(schema: Any) -> Any:
    """Return a copy in which `safe_pattern` was applied to all patterns."""
    schema = copy.deepcopy(schema)
    for _, part in parts(schema):
        if isinstance(pattern := part.get("pattern"), str):
            part["pattern"] = safe_pattern(pattern)
        if isinstance(by_name := part.get("patternProperties"), dict):
            part["patternProperties"] = {safe_pattern(key): one for key, one in by_name.items()}
    return schema


def safe_pattern(pattern: str) -> str:
    """Return the pattern without control characters in its sets, except white space.

    Where a set has control characters and lacks the quote or the backslash, llguidance would let
    the escapes of those two through. Except for \\b, control characters cannot be written without
    \\u anyway. The new pattern matches less, never more.
    """
    safe, part, depth = "", "", 0
    for token in _TOKEN.findall(pattern):
        part += token
        if token[0] == "[":
            depth += 1
        elif token == "]" and depth:
            depth -= 1
        if not depth:
            safe, part = safe + _safe_part(part), ""
    return safe + _safe_part(part)


def _safe_part(part: str) -> str:
    """Return a set, an escape or a character without control characters."""
    is_set = part[:1] == "[" and not _HARMLESS.fullmatch(part)
    is_coded = "" < part[:1] < " " or part[:2] in (r"\x", r"\u", r"\U", r"\p", r"\P", r"\a")
    return f"[{part}{_WITHOUT_CONTROLS}" if is_set or is_coded else part


BY_NAME: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
"""Keywords that hold schemas by their names."""
VALUES: Final = frozenset({"const", "enum", "default", "examples", "example", "x-guidance"})
"""Keywords that hold values, in which nothing is a keyword."""


def parts(
    schema: Any, place: str = "", keywords: Collection[str] | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (JSON pointer, schema) of all schemas that are objects, parents before children.

    One may be changed when it has come: those that follow are looked for afterwards. keywords: that
    hold schemas, besides BY_NAME; None: all but VALUES.
    """
    if isinstance(schema, list):
        for i, one in enumerate(schema):
            yield from parts(one, f"{place}/{i}", keywords)
    if not isinstance(schema, dict):
        return
    yield place, schema
    for key, value in schema.items():
        if key in BY_NAME and isinstance(value, dict):
            for name, one in value.items():
                yield from parts(one, f"{place}/{key}/{escaped(name)}", keywords)
        elif key not in VALUES if keywords is None else key in keywords:
            yield from parts(value, f"{place}/{escaped(key)}", keywords)


def escaped(key: str) -> str:
    """Escape a key for a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")
