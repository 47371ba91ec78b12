"""Where llguidance alone would let invalid values through: none comes, or the schema is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nanocore.engine_core.grammars.schema import safe_pattern
from nanocore.engine_core.grammars.token_table import TokenTable
from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.structured_outputs import StructuralTag, Structure
from tests.engine_core.grammars.walks import allowed, compiled, follow


def possible(vocabulary: TokenTable, schema: Any, texts: list[str]) -> list[str]:
    grammar = compiled(vocabulary, json=json.dumps(schema))
    return [text for text in texts if follow(vocabulary, grammar.matcher(), text)]


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (r'^[^"]$', ['"a"', r'"\\"', r'"\n"']),
        (r"^[^\\]$", ['"a"', r'"\""', r'"\n"']),
        (r'^[^/:*?"<>|]$', ['"a"', r'"\\"', r'"\n"']),
        (r"^[\x00-\x1f]$", [r'"\n"']),
        (r'^([^"\\]|[\x00-\x1f])$', ['"a"', r'"\n"']),
        (r"^[[:cntrl:]]$", [r'"\n"']),
        (r"^\p{C}$", [r'"\n"']),
        (r"^[a&&[^b]]$", ['"a"']),
        (r"^[^]\]]$", ['"a"', r'"\""', r'"\\"', r'"\n"']),
        ("^(" + "|".join(f"\\x{i:02x}" for i in range(32)) + ")$", [r'"\n"']),
        ("^.$", ['"a"', r'"\""', r'"\\"']),
    ],
)  # fmt: skip
def test_a_set_of_characters_lets_no_escape_of_another_through(
    vocabulary: TokenTable, pattern: str, texts: list[str]
) -> None:
    candidates = ['"a"', r'"\""', r'"\\"', r'"\n"', '"ab"']
    assert possible(vocabulary, {"type": "string", "pattern": pattern}, candidates) == texts
    names = [f"{{{text}:1}}" for text in candidates]
    by_name = {"type": "object", "patternProperties": {pattern: True}}
    schema = by_name | {"additionalProperties": False}
    assert possible(vocabulary, schema, names) == [f"{{{text}:1}}" for text in texts]


def test_only_sets_that_need_it_are_rewritten() -> None:
    for pattern in (r"^[a-z\d_.\]-]+\[[]x]\\$", r"\S.\W\n"):
        assert safe_pattern(pattern) == pattern
    assert safe_pattern("[]^[a]]b") == r"[[]^[a]]--[\x00-\x08\x0e-\x1f]]b"


def test_values_of_a_schema_are_not_taken_for_patterns(vocabulary: TokenTable) -> None:
    value = {"pattern": '[^"]', "maximum": 1}
    text = json.dumps(value, separators=(",", ":"))
    schema = {"properties": {"pattern": {"const": value}}, "default": {"maximum": 2**60}}
    assert possible(vocabulary, schema | {"type": "object"}, [f'{{"pattern":{text}}}'])


@pytest.mark.parametrize("name", ["a", "/", '"', "\n", "é"])
def test_a_listed_name_has_one_spelling(vocabulary: TokenTable, name: str) -> None:
    schema = {"properties": {name: {"const": 6}}, "additionalProperties": {"const": 0}}
    spellings = [json.dumps(name, ensure_ascii=False), f'"\\u{ord(name):04x}"', '"\\/"']
    texts = [f"{{{one}:{value}}}" for one in spellings for value in (0, 6)]
    schema["type"] = "object"
    assert possible(vocabulary, schema, texts) == [texts[1]]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"items":{"const":9007199254740993}}', "/items/const"),
        ('{"enum":[1,{"a":[-1e18]}]}', "/enum/1/a/0"),
        ('{"const":0.1234567890123456789}', "/const"),
        ('{"const":1e-99999999999999999999}', "/const"),
        ('{"enum":["a","\\u0001"]}', "/enum/1"),
        ('{"const":{"a":"\\u007f"}}', "/const/a"),
        ('{"properties":{"a":{"type":"integer","maximum":1e18}}}', "/properties/a/maximum"),
        ('{"type":"integer","minimum":-1e25,"maximum":1e25}', "/minimum"),
        ('{"exclusiveMaximum":1.0000000000000001}', "/exclusiveMaximum"),
        ('{"type":"integer","maximum":-7840816464949524.0}', "/maximum"),
        ('{"multipleOf":1.0000000000000000001}', "/multipleOf"),
        ('{"exclusiveMinimum":0,"maximum":0.5}', "/exclusiveMinimum"),
        ('{"minimum":-9.7,"exclusiveMaximum":-9}', "/exclusiveMaximum"),
        ('{"minimum":-0.5,"exclusiveMaximum":0}', "/exclusiveMaximum"),
        ('{"minimum":1,"exclusiveMinimum":true,"maximum":1.001}', "/minimum"),
        ('{"allOf":[{"exclusiveMinimum":1},{"type":"number","maximum":1.5}]}',
         "/allOf/0/exclusiveMinimum"),
        ('{"items":{"pattern":"(?x)[^a] # ["}}', "/items/pattern"),
        ('{"patternProperties":{"a/(?ix:b)":{}}}', "/patternProperties/a~1(?ix:b)"),
        ('{"$ref":"#/default","default":{"maximum":1e18}}', "/$ref"),
        ('{"items":{"$ref":"#/x/properties"},"x":{"properties":{}}}', "/items/$ref"),
    ],
)  # fmt: skip
def test_what_would_come_out_as_another_is_refused(
    vocabulary: TokenTable, text: str, place: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiled(vocabulary, json=text)
    assert str(caught.value).startswith(f"structured_outputs.json at {place!r}: ")


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"exclusiveMinimum": 0, "maximum": 1}, ["0.1", "1"]),
        ({"exclusiveMinimum": 0.001, "maximum": 0.5}, ["0.1"]),
        ({"minimum": -(2**53) + 1, "maximum": 2**53 - 1}, ["0", "0.1", "1"]),
        ({"type": "integer", "exclusiveMinimum": 0, "maximum": 1.5}, ["1"]),
        ({"anyOf": [{"type": "integer", "exclusiveMinimum": 0}, {"const": 0.1}]}, ["0.1", "1"]),
    ],
)  # fmt: skip
def test_bounds_are_held_that_are_not_refused(
    vocabulary: TokenTable, schema: Any, texts: list[str]
) -> None:
    candidates = ["0", "0.1", "1"]
    grammar = compiled(vocabulary, json=json.dumps({"type": "number"} | schema))
    ended = []
    for text in candidates:
        matcher = grammar.matcher()
        if follow(vocabulary, matcher, text) and follow_end(vocabulary, matcher):
            ended.append(text)
    assert ended == texts


def follow_end(vocabulary: TokenTable, matcher: Any) -> bool:
    return bool(vocabulary.eos_token_ids & set(allowed(vocabulary, matcher)))


@pytest.mark.parametrize(
    ("triggers", "refused"),
    [(["ab", "b"], 0), (["x", "<a>", "a>"], 1), (["a", "ab"], None), (["ab", "bc"], None)],
)
def test_a_trigger_within_another_is_refused(
    vocabulary: TokenTable, triggers: list[str], refused: int | None
) -> None:
    structures = [Structure(begin=one, schema="true", end=";") for one in triggers]
    tag = StructuralTag(structures=structures, triggers=triggers)
    if refused is None:
        compiled(vocabulary, structural_tag=tag)
        return
    contained = rf"triggers\[{refused}\]: .* contains the trigger"
    with pytest.raises(InvalidRequestError, match=contained):
        compiled(vocabulary, structural_tag=tag)
