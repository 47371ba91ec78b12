"""Small schemas that are each about one keyword, or about how two of them meet."""

from __future__ import annotations

from tests.structured.schemas.notation import (
    NULL,
    YES_OR_NO,
    Schema,
    either,
    integer,
    many,
    maybe,
    number,
    one_of,
    record,
    ref,
    text,
)

COUNTRIES = (
    "Argentina Australia Austria Belgium Brazil Canada Chile China Colombia Croatia Cuba "
    "Cyprus Denmark Egypt Estonia Fiji Finland France Gabon Germany Ghana Greece Hungary "
    "Iceland India Iran Iraq Ireland Israel Italy Jamaica Japan Jordan Kenya Kuwait Laos "
    "Latvia Lebanon Libya Malta Mexico Monaco Nepal Norway Oman Peru Poland Portugal "
    "Qatar Romania Rwanda Spain Sweden"
)
NUMBERS: dict[str, Schema] = {
    "integer": integer(),
    "integer-from": integer(18),
    "integer-to": integer(most=-1),
    "integer-around-zero": integer(-7, 7),
    "integer-odd-bounds": integer(13, 1027),
    "integer-negative": integer(-9999, -100),
    "integer-exclusive": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 100},
    "integer-one-value": integer(42, 42),
    "integer-large": integer(10**12, 10**15),
    "integer-multiple": integer(0, 1000, multipleOf=5),
    "number": number(),
    "number-between": number(0, 1),
    "number-fractions": number(-2.5, 3.75),
    "number-exclusive": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "number-narrow": number(0.1, 0.125),
    "number-from": number(1.5),
    "number-to": number(most=-0.25),
    "number-cents": number(0, 100, multipleOf=0.01),
    "either-number": {"type": ["integer", "null"], "minimum": 3},
}
TEXTS: dict[str, Schema] = {
    "string": text(),
    "string-empty": text(0),
    "string-at-least": text(least=3),
    "string-at-most": text(10),
    "string-exactly": text(4, 4),
    "string-long": text(300, 20),
    "pattern-anchored": text(pattern="^[a-z]+$"),
    "pattern-start": text(pattern="^ab"),
    "pattern-end": text(pattern="yz$"),
    "pattern-inside": text(pattern="[0-9]"),
    "pattern-either": text(pattern="^(cat|dog|bird)s?$"),
    "pattern-escapes": text(pattern=r"^\d{2}\.\w{1,4}\s?$"),
    "pattern-quotes": text(pattern='^"[a-z]{1,5}"$'),
    "pattern-backslash": text(pattern=r"^[A-Z]:(\\[a-z]{1,6}){1,3}$"),
    "pattern-unicode": text(pattern="^[äöüß]{1,6}$"),
    "pattern-not-class": text(pattern="^[^a-z]{1,6}$"),
    "pattern-lazy": text(pattern="^<.{1,8}?>$"),
    "pattern-and-length": text(12, 5, pattern="^[ab]*$"),
    "pattern-emoji": text(pattern="^[😀-😎]{1,3}$"),
    "format-date": text(format="date"),
    "format-time": text(format="time"),
    "format-date-time": text(format="date-time"),
    "format-duration": text(format="duration"),
    "format-email": text(format="email"),
    "format-hostname": text(format="hostname"),
    "format-ipv4": text(format="ipv4"),
    "format-ipv6": text(format="ipv6"),
    "format-uuid": text(format="uuid"),
    "format-uri": text(format="uri"),
}
CHOICES: dict[str, Schema] = {
    "boolean": YES_OR_NO,
    "null": NULL,
    "const-text": {"const": "fixed"},
    "const-number": {"const": 3.25},
    "const-object": {"const": {"a": [1, 2, {"b": None}], "c": "d"}},
    "const-escapes": {"const": 'quote " backslash \\ newline \n tab \t é 漢 😀'},
    "enum-escapes": one_of('"', "\\", "\n", "/", "\u2028", "</script>"),
    "enum-special-tokens": one_of("<|im_start|>", "<|im_end|>", "a <|im_end|> b"),
    "enum-mixed": one_of(1, "1", 1.5, None, True, [1], {"one": 1}),
    "enum-prefixes": one_of("a", "ab", "abc", "abcd", "b"),
    "enum-countries": one_of(*COUNTRIES.split()),
    "enum-of-500": one_of(*(f"code_{i:03d}" for i in range(500))),
    "enum-of-numbers": one_of(*range(0, 3000, 7)),
    "enum-one": one_of("only"),
    "type-list": {"type": ["string", "number", "null"], "maxLength": 12},
    "type-list-object": {
        "type": ["object", "boolean"],
        "properties": {"x": integer(0, 9)},
        "required": ["x"],
        "additionalProperties": False,
    },
    "any-of-types": either(integer(0, 99), text(10), YES_OR_NO, NULL),
    "any-of-arrays": either(many(integer(0, 9), 1, 2), many(text(3), 1, 2)),
    "any-of-nested": either(either(one_of("a"), one_of("b")), either(one_of(1), NULL)),
    "one-of-discriminated": {
        "oneOf": [
            record({"kind": {"const": "circle"}, "r": number(0, 10)}),
            record({"kind": {"const": "square"}, "a": number(0, 10)}),
        ]
    },
    "all-of-objects": {
        "allOf": [
            {"type": "object", "properties": {"a": integer(0, 9)}, "required": ["a"]},
            {"type": "object", "properties": {"b": text(5)}, "required": ["b"]},
        ]
    },
    "all-of-bounds": {"allOf": [integer(0), integer(most=50)], "type": "integer"},
    "all-of-ref": {
        "$defs": {
            "base": {"type": "object", "properties": {"id": integer(1, 999)}, "required": ["id"]}
        },
        "allOf": [ref("base"), {"properties": {"name": text(10)}, "required": ["name"]}],
    },
}
CONTAINERS: dict[str, Schema] = {
    "array-of-any": {"type": "array", "items": True, "maxItems": 2},
    "array-empty": {"type": "array", "maxItems": 0},
    "array-exactly": many(integer(0, 9), 3, 3),
    "array-at-least": many(YES_OR_NO, 2),
    "array-at-most": many(YES_OR_NO, None, 3),
    "array-unbounded": many(integer(0, 9)),
    "array-nested": many(many(many(integer(0, 1), 1, 2), 1, 2), 1, 2),
    "array-of-nullable": many(maybe(text(5)), 1, 3),
    "tuple-closed": {"type": "array", "prefixItems": [text(5), integer(0, 9)], "items": False},
    "tuple-open": {
        "type": "array",
        "prefixItems": [text(5)],
        "items": integer(0, 9),
        "maxItems": 4,
    },
    "tuple-whole": {
        "type": "array",
        "prefixItems": [{"const": "rgb"}, integer(0, 255), integer(0, 255), integer(0, 255)],
        "minItems": 4,
        "items": False,
    },
    "object-optional-all": record({f"{c}?": integer(0, 9) for c in "abcdefgh"}),
    "object-one-of-many-required": record({"a?": YES_OR_NO, "b": YES_OR_NO, "c?": YES_OR_NO}),
    "object-required-last": record({"z?": integer(0, 9), "y?": integer(0, 9), "x": integer(0, 9)}),
    "object-rest-typed": record({"id": integer(0, 9)}, rest=number(0, 1)),
    "object-rest-nullable": record({}, rest=maybe(text(5))),
    "object-max-properties": {
        "type": "object",
        "additionalProperties": integer(0, 9),
        "maxProperties": 2,
    },
    "object-min-properties": {"type": "object", "additionalProperties": NULL, "minProperties": 1},
    "object-required-unlisted": {
        "type": "object",
        "properties": {"a": integer(0, 9)},
        "required": ["a", "b"],
        "additionalProperties": text(4),
    },
    "object-deep": record({"a": record({"b": record({"c": record({"d": record({"e": NULL})})})})}),
    "object-wide": record({f"column_{i}": one_of(0, 1) for i in range(24)}),
    "object-names-escaped": record({'"': NULL, "\\": NULL, "\n": NULL, "/": NULL, "": NULL}),
    "object-names-unicode": record({"naïve": NULL, "ключ": NULL, "鍵": NULL, "🔑": NULL}),
    "object-names-prefixes": record({"a": NULL, "ab?": NULL, "abc?": NULL}, rest=integer(0, 9)),
    "object-names-keywords": record(
        {"type": NULL, "$ref": NULL, "properties": NULL, "enum?": NULL}
    ),
    "object-pattern-names": {
        "type": "object",
        "patternProperties": {"^x-": text(5), "^[0-9]{1,3}$": integer(0, 9)},
        "additionalProperties": False,
    },
    "ref-definitions": {
        "definitions": {"pair": many(integer(0, 9), 2, 2)},
        "type": "array",
        "items": {"$ref": "#/definitions/pair"},
        "maxItems": 3,
    },
    "ref-to-root": {
        "type": "object",
        "properties": {"child": {"$ref": "#"}, "n": integer(0, 9)},
        "required": ["n"],
        "additionalProperties": False,
    },
    "ref-chain": {"$defs": {"a": ref("b"), "b": ref("c"), "c": integer(0, 9)}, "$ref": "#/$defs/a"},
    "ref-with-neighbours": {
        "$defs": {"age": integer(0)},
        **record({"age": {"$ref": "#/$defs/age", "maximum": 150, "description": "in years"}}),
    },
    "ref-escaped-name": {"$defs": {"a/b~c": one_of("x")}, "$ref": "#/$defs/a~1b~0c"},
    "ref-mutual": {
        "$defs": {
            "even": either(NULL, record({"odd": ref("odd")})),
            "odd": record({"even": ref("even")}),
        },
        "$ref": "#/$defs/even",
    },
    "annotations": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/tree.schema.json",
        "title": "Tree",
        "description": "Annotations change nothing",
        "$comment": "really",
        "examples": [{"height_m": 3}],
        **record({"height_m": {**number(0, 130), "default": 1, "deprecated": False}}),
    },
    "no-type-object": {"properties": {"a": integer(0, 9)}, "required": ["a"]},
}
SINGLE_KEYWORDS = NUMBERS | TEXTS | CHOICES | CONTAINERS
