"""A short notation for JSON Schemas, so that three hundred of them can be read.

It only writes what people write: `record({"name": text(), "age?": integer(0, 150)})` is an object
of which "age" may be left out.
"""

from __future__ import annotations

from typing import Any, TypeAlias

Schema: TypeAlias = "dict[str, Any] | bool"

YES_OR_NO: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}


def keywords(**given: Any) -> dict[str, Any]:
    """Those that are not None."""
    return {name: value for name, value in given.items() if value is not None}


def text(
    most: int | None = None,
    least: int | None = None,
    *,
    pattern: str | None = None,
    format: str | None = None,
    about: str | None = None,
) -> dict[str, Any]:
    """A string of least to most characters."""
    return {
        "type": "string",
        **keywords(
            minLength=least, maxLength=most, pattern=pattern, format=format, description=about
        ),
    }


def integer(least: int | None = None, most: int | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "integer", **keywords(minimum=least, maximum=most), **more}


def number(least: float | None = None, most: float | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "number", **keywords(minimum=least, maximum=most), **more}


def one_of(*values: Any) -> dict[str, Any]:
    """An enumeration; of texts it says so, as most people do."""
    if all(isinstance(value, str) for value in values):
        return {"type": "string", "enum": [*values]}
    return {"enum": [*values]}


def many(item: Schema, least: int | None = None, most: int | None = None) -> dict[str, Any]:
    return {"type": "array", "items": item, **keywords(minItems=least, maxItems=most)}


def record(fields: dict[str, Schema], rest: Schema | None = False, **more: Any) -> dict[str, Any]:
    """An object. "name?" may be left out. rest: additionalProperties; None: not said."""
    return {
        "type": "object",
        "properties": {name.removesuffix("?"): schema for name, schema in fields.items()},
        "required": [name for name in fields if not name.endswith("?")],
        **keywords(additionalProperties=rest),
        **more,
    }


def either(*schemas: Schema) -> dict[str, Any]:
    return {"anyOf": [*schemas]}


def maybe(schema: Schema) -> dict[str, Any]:
    """It, or null."""
    return either(schema, NULL)


def ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}
