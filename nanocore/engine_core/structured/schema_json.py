"""A JSON Schema's text, made Python objects.

It is held to its depth before anything recursive sees it, and to what JSON can say.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from nanocore.protocol.errors import InvalidRequestError, shorten

MAX_SCHEMA_DEPTH: Final = 64
"""Of arrays and objects in one another."""


class Rounded(float):
    """A number that was written with more digits than it holds."""


def parse_schema(field: str, text: str) -> Any:
    """The JSON value of a text.

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
    raise ValueError(f"{text} is no number of JSON: leave it out")


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
