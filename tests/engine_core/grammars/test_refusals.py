"""What cannot be compiled is refused with the place where the trouble is, and the reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nanocore.engine_core.grammars.schema import MAX_SCHEMA_DEPTH
from nanocore.engine_core.grammars.token_table import TokenTable
from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.structured_outputs import StructuralTag, Structure
from tests.engine_core.grammars.walks import compiled


def refusal(vocabulary: TokenTable, **wanted: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        compiled(vocabulary, **wanted)
    return str(caught.value)


def many(**last: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(200)} | last}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "objct"}, "/type"),
        ({"properties": {"a": {"not": {}}}}, "/properties/a/not"),
        (many(p57={"items": {"type": "text"}}), "/properties/p57/items/type"),
        (many(z={"items": {"type": "text"}}), "/properties/z/items/type"),
        ({"properties": {"not": {"items": {"not": {}}}}}, "/properties/not/items/not"),
        ({"anyOf": [{}, {"properties": {"a/b~c": {"format": "odd"}}}]},
         "/anyOf/1/properties/a~1b~0c/format"),
        ({"$ref": "#/$defs/x", "$defs": {"w": {"not": {}}, "x": {"items": {"not": {}}}}},
         "/$defs/x/items/not"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "/properties/a/$ref"),
        ({"properties": {"a": {"$ref": "http://localhost/x"}}}, "/properties/a/$ref"),
        ({"properties": {"a": {"type": "string", "pattern": "x(a"}}}, "/properties/a/pattern"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}, "/properties/a/pattern"),
        ({"items": {"patternProperties": {"(?=a)b": {}}}}, "/items/patternProperties"),
        ({"items": {"minLength": -1}}, "/items/minLength"),
        ({"items": {"oneOf": [{"minimum": 1}, {"maximum": 5}]}}, "/items/oneOf"),
        ({"prefixItems": [{}, {"uniqueItems": True}]}, "/prefixItems/1/uniqueItems"),
        ({"items": {"multipleOf": 1000003}}, "/items/multipleOf"),
        ({"items": {"minProperties": 2, "required": ["a"]}}, "/items/minProperties"),
        ({"items": {"pattern": "a?" * 1001}}, "/items/pattern"),
    ],
)  # fmt: skip
def test_a_schema_is_refused_with_a_json_pointer(
    vocabulary: TokenTable, schema: Any, place: str
) -> None:
    assert refusal(vocabulary, json=json.dumps(schema)).startswith(
        f"structured_outputs.json at {place!r}"
    )


@pytest.mark.parametrize("lenient", [[], [""]])
@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"type": "objekt"}, "type': 'objekt' is not one of array, boolean, integer, "),
        ({"type": ["string", 3]}, "type': ['string', 3] is not one of "),
        ({"minLength": "x"}, "minLength': 'x' is not a whole number from 0"),
        ({"maxItems": 1.5}, "maxItems': 1.5 is not a whole number from 0"),
        ({"minimum": True}, "minimum': True is not a number"),
        ({"exclusiveMaximum": "9"}, "exclusiveMaximum': '9' is not a number"),
        ({"multipleOf": 0}, "multipleOf': 0 is not a number above 0"),
        ({"required": "a"}, "required': 'a' is not a list of names"),
        ({"enum": 3}, "enum': 3 is not a list of values"),
        ({"properties": []}, "properties': [] is not an object"),
        ({"anyOf": {}}, "anyOf': {} is not a list of schemas"),
        ({"allOf": [{}, "a"]}, "allOf': [{}, 'a'] is not a list of schemas"),
        ({"items": "string"}, "items': 'string' is not a schema, or a list of them"),
        ({"additionalProperties": "no"}, "additionalProperties': 'no' is not a schema"),
        ({"pattern": 3}, "pattern': 3 is not a string"),
        ({"uniqueItems": "yes"}, "uniqueItems': 'yes' is not true or false"),
        ({"items": {"$defs": {"a/b": {"type": 5}}}}, "items/$defs/a~1b/type': 5 is not one of "),
    ],
)  # fmt: skip
def test_what_no_schema_may_have_is_refused_even_in_lenient_parts(
    vocabulary: TokenTable, part: dict[str, Any], problem: str, lenient: list[str]
) -> None:
    schema = {"type": "object", "properties": {"q": part}}
    error = refusal(vocabulary, json=json.dumps(schema), lenient=lenient)
    assert f"structured_outputs.json at '/properties/q/{problem}" in error


def test_values_and_unknown_keywords_may_look_like_schemas(vocabulary: TokenTable) -> None:
    odd = {"type": "slider", "required": "yes"}
    schema = {"type": "object", "properties": {"type": {"const": odd, "x-ui": odd}}}
    compiled(vocabulary, json=json.dumps(schema), lenient=[""])


@pytest.mark.parametrize(
    "schema",
    [
        {"minProperties": 1},
        {"minProperties": 2, "required": ["a", "b"]},
    ],
)
def test_properties_are_counted_where_none_can_come_twice(
    vocabulary: TokenTable, schema: Any
) -> None:
    compiled(vocabulary, json=json.dumps({"type": "object"} | schema))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"type": "object",\n  type}', "at line 2, column 3"),
        ("", "at line 1, column 1"),
        ('{"const": 1e999}', "the number 1e999 is too large"),
        ('{"const": NaN}', "NaN"),
        ('{"maximum": ' + "9" * 5000 + "}", "is too large"),
        ('{"const": "\\ud83d"}', "half a surrogate pair"),
        ("[1]", "schema must be an object or boolean"),
        ("false", "Unsatisfiable schema"),
        ('{"type":"integer","minimum":5,"maximum":2}', "Unsatisfiable schema"),
    ],
)
def test_text_that_is_no_schema_is_refused(vocabulary: TokenTable, text: str, words: str) -> None:
    message = refusal(vocabulary, json=text)
    assert words in message
    assert len(message) < 700


def test_a_schema_is_refused_that_is_deeper_than_allowed(vocabulary: TokenTable) -> None:
    def nested(depth: int) -> str:
        text = '{"const":"{[\\"["}'
        for i in range(depth - 1):
            text = f'{{"items":{text}}}' if i % 2 else f'{{"allOf":\n[{text}]}}'
        return text

    depth = 1 + (MAX_SCHEMA_DEPTH - 1) * 2 // 3
    compiled(vocabulary, json=nested(depth))
    assert "more than 64 arrays and objects in one another, at line " in refusal(
        vocabulary, json=nested(depth + 1)
    )


@pytest.mark.parametrize(
    ("regex", "words"),
    [
        ("ab(c", "at character 2: invalid regex: unclosed group"),
        ("é/\n[z-a]", "invalid regex: invalid character class range"),
        ("(a)\\1", "invalid regex: backreferences are not supported"),
        ("a\\bc", "lookarounds not supported"),
        ("ab\\", "at character 2: a backslash"),
        ("[^\\s\\S]", "nothing matches it"),
        ("", "is empty"),
        ("a?" * 1001, "has 1001 repetitions: at most 1000"),
    ],
)
def test_a_regex_is_refused_with_a_reason(vocabulary: TokenTable, regex: str, words: str) -> None:
    message = refusal(vocabulary, regex=regex)
    assert message.startswith("structured_outputs.regex")
    assert words in message


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('start: foo\n\nfoo: "a" "', "at line 3, column 11: lexer error"),
        ("start: foo", 'at line 1, column 8: unknown name: "foo"'),
        ("start: A\nA: /[z-a]/", "at line 2, column 4: invalid regex: invalid character class"),
        ('stat: "x"', "no start rule found"),
        ('root ::= "a"', """; grammars here are Lark's, not GBNF: start: "a" | "b\""""),
        ("start: <|none|>", "unknown special token"),
        ("start: <[5000]>", "Token range end too large"),
    ],
)
def test_a_grammar_is_refused_with_line_and_column(
    vocabulary: TokenTable, grammar: str, words: str
) -> None:
    message = refusal(vocabulary, grammar=grammar)
    assert message.startswith("structured_outputs.grammar")
    assert words in message


def test_a_structure_is_refused_with_its_number_and_place(vocabulary: TokenTable) -> None:
    def tag(schema: str) -> StructuralTag:
        schemas = ["true", '{"type":"null"}', schema]
        return StructuralTag(
            structures=[
                Structure(begin=f"<{i}>", schema=one, end="") for i, one in enumerate(schemas)
            ],
            triggers=["<"],
        )

    name = "structured_outputs.structural_tag.structures[2].schema"
    message = refusal(vocabulary, structural_tag=tag('{"items":{"not":{}}}'))
    assert message.startswith(f"{name} at '/items/not': ")
    assert refusal(vocabulary, structural_tag=tag("{")).startswith(f"{name} is not JSON: ")


def test_merged_multiples_that_llguidance_would_get_wrong_are_refused(
    vocabulary: TokenTable,
) -> None:
    """Their least common multiple would overflow its 32 bits; apart, they are no trouble."""
    parts = [{"type": "integer", "multipleOf": prime} for prime in (997, 991, 983, 977)]
    assert "'/allOf/1/multipleOf'" in refusal(vocabulary, json=json.dumps({"allOf": parts}))
    compiled(vocabulary, json=json.dumps({"prefixItems": parts}))
