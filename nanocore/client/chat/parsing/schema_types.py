"""Text to JSON by the types that a schema allows, for formats that write values without quotes."""

from __future__ import annotations

import json
from typing import Any, Final

from nanocore.client.chat.parsing.json_reading import json_string

_MAX_SCHEMAS: Final = 64
"""Schemas looked at for one parameter: they may refer to each other in a circle."""
_LITERALS: Final = {"true": "boolean", "false": "boolean", "null": "null", "none": "null"}
_KINDS: Final[dict[type, str]] = {
    str: "string", bool: "boolean", type(None): "null", int: "integer", float: "number",
    list: "array", dict: "object",
}  # fmt: skip


def types_of(parameters: dict[str, Any], name: str) -> frozenset[str]:
    """The JSON types that a property of a tool's parameters may have; empty if they are unknown.

    Follows type, anyOf, oneOf, allOf, and $ref within the parameters; without a type, the values of
    enum and const say it.
    """
    properties = parameters.get("properties")
    pending = [properties.get(name)] if isinstance(properties, dict) else []
    found: set[str] = set()
    for _ in range(_MAX_SCHEMAS):
        if not pending:
            break
        schema = pending.pop()
        if not isinstance(schema, dict):
            continue
        kinds = schema.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        found.update(kind for kind in kinds if isinstance(kind, str))
        if "type" not in schema:
            values = schema["enum"] if isinstance(schema.get("enum"), list) else []
            values = [*values, *([schema["const"]] if "const" in schema else [])]
            found.update(_KINDS[type(value)] for value in values if type(value) in _KINDS)
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(key), list):
                pending += schema[key]
        if isinstance(schema.get("$ref"), str):
            pending.append(_resolved(parameters, schema["$ref"]))
    return frozenset(found)


def _resolved(root: dict[str, Any], reference: str) -> object:
    if not reference.startswith("#/"):
        return None
    node: object = root
    for part in reference[2:].split("/"):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def to_json(text: str, types: frozenset[str]) -> str:
    """The text as JSON of one of these types, if it is that; else as a string."""
    stripped = text.strip()
    kind = _LITERALS.get(stripped.lower())
    if kind in types:
        return "null" if kind == "null" else stripped.lower()
    try:
        value = json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json_string(text)
    kind = _KINDS.get(type(value))
    if kind in types or (kind == "integer" and "number" in types):
        return stripped
    return json_string(text)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
