"""Lenient parts of a schema are held but for keywords that the grammar lacks, which are told."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from nanocore.engine_core.grammars.token_table import TokenTable
from nanocore.protocol.errors import InvalidRequestError
from tests.engine_core.grammars.walks import compiled, walk

PATTERN = {"type": "string", "pattern": "^(?!a)b$"}


@pytest.mark.parametrize(
    ("part", "keywords"),
    [
        ({"type": "array", "uniqueItems": True}, ["uniqueItems"]),
        ({"type": "string", "format": "password"}, ["format"]),
        ({"not": {"type": "string"}}, ["not"]),
        ({"type": "object", "propertyNames": {"type": "string"}}, ["propertyNames"]),
        (PATTERN, ["pattern"]),
        ({"pattern": "a?" * 1001}, ["pattern"]),
        ({"patternProperties": {"^(?!x)": {}}, "additionalProperties": False},
         ["patternProperties"]),
        ({"if": {"type": "string"}, "then": {"minLength": 2}}, ["if", "then"]),
        ({"dependentRequired": {"a": ["b"]}}, ["dependentRequired"]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["minimum", "maximum"]),
        ({"enum": [2**60, 1]}, ["enum"]),
        ({"minProperties": 2}, ["minProperties"]),
        ({"multipleOf": 1000003}, ["multipleOf"]),
        ({"type": "any"}, ["type"]),
        ({"$ref": "https://example.org/none"}, ["$ref"]),
        ({"$ref": "#/properties/q/enum", "enum": [1]}, ["$ref"]),
        ({"oneOf": [{"type": "object"}, {"properties": {"a": {}}}]}, ["oneOf"]),
    ],
)  # fmt: skip
def test_what_the_grammar_lacks_is_left_out_and_told(
    vocabulary: TokenTable, part: dict[str, Any], keywords: list[str]
) -> None:
    schema = {"type": "object", "properties": {"q": part, "n": {"type": "null"}}}
    with pytest.raises(InvalidRequestError):
        compiled(vocabulary, json=json.dumps(schema))
    grammar = compiled(vocabulary, json=json.dumps(schema), lenient=[""])
    assert grammar.not_held == [f"/properties/q/{keyword}" for keyword in keywords]


def test_all_else_is_held(vocabulary: TokenTable) -> None:
    schema = {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "uniqueItems": True,
                     "maxItems": 3, "minItems": 1},
            "name": {**PATTERN, "maxLength": 2},
            "one": {"oneOf": [{"const": 1}, {"type": "integer", "maximum": 3}]},
        },
        "required": ["tags", "name", "one"],
        "additionalProperties": False,
    }  # fmt: skip
    grammar = compiled(vocabulary, json=json.dumps(schema), lenient=[""])
    held = jsonschema.Draft202012Validator(
        {
            **schema,
            "properties": {
                "tags": {"items": {"enum": ["x", "y"]}, "maxItems": 3, "minItems": 1},
                "name": {"type": "string", "maxLength": 2},
                "one": {"type": "integer", "maximum": 3},
            },
        }
    )
    texts = [walk(vocabulary, grammar, random.Random(seed)) for seed in range(20)]
    outputs = [json.loads(text) for text in texts if text is not None]
    assert len(outputs) > 5
    for output in outputs:
        held.validate(output)


def test_what_is_not_lenient_is_refused_beside_what_is(vocabulary: TokenTable) -> None:
    schema = {
        "anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        "$defs": {"a": {"properties": {"x": PATTERN}}, "b": {"items": PATTERN}},
    }
    with pytest.raises(InvalidRequestError, match=r"at '/\$defs/b/items/pattern'"):
        compiled(vocabulary, json=json.dumps(schema), lenient=["/$defs/a"])
    both = compiled(vocabulary, json=json.dumps(schema), lenient=["/$defs/a", "/$defs/b"])
    assert both.not_held == ["/$defs/a/properties/x/pattern", "/$defs/b/items/pattern"]


@pytest.mark.parametrize("schema", ['{"enum": []}', '{"properties": null}', "[1]", "{"])
def test_what_is_said_wrongly_is_refused_although_it_is_lenient(
    vocabulary: TokenTable, schema: str
) -> None:
    with pytest.raises(InvalidRequestError):
        compiled(vocabulary, json=schema, lenient=["", "/none"])


def test_lenient_parts_are_of_a_schema(vocabulary: TokenTable) -> None:
    with pytest.raises(InvalidRequestError, match="is for json, and this is regex"):
        compiled(vocabulary, regex="a", lenient=[""])
    with pytest.raises(InvalidRequestError, match="'properties' is not a JSON pointer"):
        compiled(vocabulary, json="{}", lenient=["", "/properties", "properties"])
