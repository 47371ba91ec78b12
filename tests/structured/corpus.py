"""More than three hundred JSON Schemas of the kinds that people send, all written for this project.

`SCHEMAS` has those that the engine compiles, by their names (schemas.jsonl); `REFUSED` those that
it cannot, with words of the error that a user gets.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

Schema: TypeAlias = "dict[str, Any] | bool"

with Path(__file__).with_name("schemas.jsonl").open(encoding="utf-8") as _file:
    SCHEMAS: dict[str, Schema] = {one["name"]: one["schema"] for one in map(json.loads, _file)}
PARTS = ("call", "record", "payload", "keyword", "composed")
"""Tool calls, records drawn out of texts, bodies of requests, single keywords, mixtures."""
TEXT: dict[str, Any] = {"type": "string"}
INTEGER: dict[str, Any] = {"type": "integer"}

REFUSED: dict[str, tuple[Schema, str]] = {
    "not": ({"not": TEXT}, r'"not"'),
    "if": ({"if": TEXT, "then": TEXT | {"maxLength": 3}}, r'"if", "then"'),
    "contains": ({"type": "array", "contains": INTEGER}, r'"contains"'),
    "unique-items": ({"type": "array", "uniqueItems": True}, r'"uniqueItems"'),
    "property-names": (
        {"type": "object", "propertyNames": TEXT | {"maxLength": 3}},
        r'"propertyNames"',
    ),
    "dependent": ({"type": "object", "dependentRequired": {"a": ["b"]}}, r'"dependentRequired"'),
    "unevaluated": ({"type": "object", "unevaluatedProperties": False}, r"unevaluatedProperties"),
    "other-document": ({"$ref": "https://example.com/other.json"}, r"https://example\.com/other"),
    "no-such-definition": ({"$ref": "#/$defs/none"}, r"/\$defs/none"),
    "circle-of-references": (
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        r"structured_outputs\.json",
    ),
    "unknown-type": ({"type": "text"}, r"'text' is not one of array"),
    "unknown-format": (TEXT | {"format": "phone"}, r"format: phone"),
    "bad-pattern": (TEXT | {"pattern": "("}, r"unclosed group"),
    "look-ahead": (TEXT | {"pattern": "^(?=a)b"}, r"look-ahead"),
    "back-reference": (TEXT | {"pattern": r"^(a)\1$"}, r"backreferences"),
    "no-alternative": ({"enum": []}, r"[Uu]nsatisfiable"),
    "bounds-crossed": (INTEGER | {"minimum": 3, "maximum": 2}, r"minimum \(3\)"),
    "lengths-crossed": (TEXT | {"maxLength": 2, "minLength": 3}, r"minLength \(3\)"),
    "counts-crossed": ({"type": "array", "minItems": 3, "maxItems": 2}, r"minItems \(3\)"),
    "no-integer-between": (
        {"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 3},
        r"no integer",
    ),
    "two-types": ({"allOf": [TEXT, INTEGER]}, r"incompatible types"),
    "overlapping-one-of": ({"oneOf": [INTEGER, {"type": "number"}]}, r"oneOf"),
    "required-but-forbidden": (
        {"type": "object", "required": ["b"], "additionalProperties": False},
        r"'b' is unsatisfiable",
    ),
    "number-beyond-doubles": ({"const": 2**53 + 1}, r"beyond 2\^53"),
    "bound-beyond-doubles": (INTEGER | {"minimum": 0, "maximum": 10**18}, r"beyond 2\^53"),
    "control-character": ({"enum": ["a", "\0"]}, r"control character"),
    "excluded-and-close": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
        r"less than 1 away",
    ),
}
