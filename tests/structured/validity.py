"""Whether a text is JSON that a schema calls valid, as `jsonschema` sees it.

Formats are checked. Numbers are exact: fractions are Decimals, in schemas as in outputs. NaN and
Infinity are not JSON. Of a property that is there twice the last one counts, as nearly everywhere.
"""

from __future__ import annotations

import decimal
import json
from decimal import Decimal
from typing import Any

from jsonschema import Draft202012Validator, ValidationError

from tests.structured.corpus import Schema
from tests.structured.formats import FORMATS


def parse(text: str) -> Any:
    """Raises:
    ValueError: it is no JSON.
    """

    def no_constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_float=fraction, parse_constant=no_constant)


def fraction(text: str) -> Decimal | float:
    """Exact, but for exponents of more than 18 digits: those are infinite or 0."""
    try:
        return Decimal(text)
    except decimal.InvalidOperation:
        return float(text)


def exact_validator(schema: Schema) -> Draft202012Validator:
    schema = json.loads(json.dumps(schema), parse_float=Decimal)
    return Draft202012Validator(schema, format_checker=FORMATS)


def why_invalid(validator: Draft202012Validator, text: str) -> str | None:
    """None if the text is JSON and valid."""
    with decimal.localcontext(prec=2000, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX):
        try:
            validator.validate(parse(text))
        except ValidationError as error:
            return f"{error.json_path}: {error.message}"
        except ValueError as error:
            return str(error)
    return None
