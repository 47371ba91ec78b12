"""What in a JSON Schema is a schema: all that is, whatever holds it, and nothing that is a value.

An unknown keyword may hold schemas, for a $ref may lead there; one that leads into a value, or to
what holds schemas by their names, is refused, so that nothing is compiled that was not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote

from nanocore.protocol.errors import InvalidRequestError, shorten

BY_NAME: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
"""Keywords that hold schemas by their names."""
VALUES: Final = frozenset({"const", "enum", "default", "examples", "example", "x-guidance"})
"""Keywords that hold values, in which nothing is a keyword."""


class SchemaError(InvalidRequestError):
    """A schema is refused. place: of the keyword to blame, or of a value in it; a JSON pointer."""

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place


def parts(schema: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """(JSON pointer, schema) of all schemas that are objects, each before those that it holds.

    One may be changed when it has come: those that follow are looked for afterwards.
    """
    if isinstance(schema, list):
        for i, one in enumerate(schema):
            yield from parts(one, f"{place}/{i}")
    if not isinstance(schema, dict):
        return
    yield place, schema
    for key, value in schema.items():
        if key in BY_NAME and isinstance(value, dict):
            for name, one in value.items():
                yield from parts(one, f"{place}/{key}/{escaped(name)}")
        elif key not in VALUES and isinstance(value, (dict, list)):
            yield from parts(value, f"{place}/{escaped(key)}")


def check_references(field: str, schema: Any) -> None:
    """Raises:
    InvalidRequestError: a $ref leads to something that `parts` does not hold to be a schema.
    """
    for place, part in parts(schema):
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            reference = part.get(keyword)
            if isinstance(reference, str) and not _leads_to_a_part(reference):
                raise SchemaError(
                    f"structured_outputs.{field} at '{place}/{keyword}': {shorten(reference)} "
                    "leads to a value, or to schemas by their names: put the schema into $defs",
                    f"{place}/{keyword}",
                )


def _leads_to_a_part(reference: str) -> bool:
    by_name = False
    for key in unquote(reference.partition("#")[2]).split("/")[1:]:
        if not by_name and key in VALUES:
            return False
        by_name = not by_name and key in BY_NAME
    return not by_name


def escaped(key: str) -> str:
    """As a JSON pointer has it."""
    return key.replace("~", "~0").replace("/", "~1")
