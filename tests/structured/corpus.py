"""More than three hundred JSON Schemas of the kinds that people send, all written for this project.

`SCHEMAS` has those that the engine compiles, by their names; `REFUSED` those that it cannot, with
words of the error that a user gets.
"""

from __future__ import annotations

from tests.structured.schemas.composed import COMPOSED
from tests.structured.schemas.notation import Schema, integer, text
from tests.structured.schemas.payloads import PAYLOADS
from tests.structured.schemas.records import RECORDS
from tests.structured.schemas.single_keywords import SINGLE_KEYWORDS
from tests.structured.schemas.tool_calls import TOOL_CALLS

PARTS = {
    "call": TOOL_CALLS,
    "record": RECORDS,
    "payload": PAYLOADS,
    "keyword": SINGLE_KEYWORDS,
    "composed": COMPOSED,
}
SCHEMAS: dict[str, Schema] = {
    f"{part}-{name}": schema for part, schemas in PARTS.items() for name, schema in schemas.items()
}

REFUSED: dict[str, tuple[Schema, str]] = {
    "not": ({"not": text()}, r'"not"'),
    "if": ({"if": text(), "then": text(3)}, r'"if", "then"'),
    "contains": ({"type": "array", "contains": integer()}, r'"contains"'),
    "unique-items": ({"type": "array", "uniqueItems": True}, r'"uniqueItems"'),
    "property-names": ({"type": "object", "propertyNames": text(3)}, r'"propertyNames"'),
    "dependent": ({"type": "object", "dependentRequired": {"a": ["b"]}}, r'"dependentRequired"'),
    "unevaluated": ({"type": "object", "unevaluatedProperties": False}, r"unevaluatedProperties"),
    "other-document": ({"$ref": "https://example.com/other.json"}, r"https://example\.com/other"),
    "no-such-definition": ({"$ref": "#/$defs/none"}, r"/\$defs/none"),
    "circle-of-references": (
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        r"structured_outputs\.json",
    ),
    "unknown-type": ({"type": "text"}, r"type: text"),
    "unknown-format": (text(format="phone"), r"format: phone"),
    "bad-pattern": (text(pattern="("), r"unclosed group"),
    "look-ahead": (text(pattern="^(?=a)b"), r"look-ahead"),
    "back-reference": (text(pattern=r"^(a)\1$"), r"backreferences"),
    "no-alternative": ({"enum": []}, r"[Uu]nsatisfiable"),
    "bounds-crossed": (integer(3, 2), r"minimum \(3\)"),
    "lengths-crossed": (text(2, 3), r"minLength \(3\)"),
    "counts-crossed": ({"type": "array", "minItems": 3, "maxItems": 2}, r"minItems \(3\)"),
    "no-integer-between": (
        {"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 3},
        r"no integer",
    ),
    "two-types": ({"allOf": [text(), integer()]}, r"incompatible types"),
    "overlapping-one-of": ({"oneOf": [integer(), {"type": "number"}]}, r"oneOf"),
    "required-but-forbidden": (
        {"type": "object", "required": ["b"], "additionalProperties": False},
        r"'b' is unsatisfiable",
    ),
    "number-beyond-doubles": ({"const": 2**53 + 1}, r"beyond 2\^53"),
    "bound-beyond-doubles": (integer(0, 10**18), r"beyond 2\^53"),
    "control-character": ({"enum": ["a", "\0"]}, r"control character"),
    "excluded-and-close": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
        r"less than 1 away",
    ),
}
