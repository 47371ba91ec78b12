"""Every kind of structured output, on tokenizers of every kind: what masks allow is what was asked.

Walks take random tokens of the masks; whatever ends is then looked at by other libraries.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from nanocore.engine_core.grammars.token_table import TokenTable
from nanocore.protocol.structured_outputs import StructuralTag, Structure
from tests.campaign import in_campaign
from tests.engine_core.grammars.walks import (
    allowed,
    byte_fallback_vocabulary,
    byte_level_vocabulary,
    compiled,
    demo_vocabulary,
    follow,
    walk,
)

WALKS = 6
SCHEMAS: list[Any] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b\n", 'é"']}, "maxItems": 3},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"enum": ["x", "xy", 12, 1.5, None, True, [1], {"a": {}}]},
    {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-c]{2,4}$"}]},
    {"type": "array", "minItems": 2, "maxItems": 3, "items": {"type": "number", "maximum": 7}},
    {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#"}}}},
    {"type": "string", "format": "date"},
    {"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 99},
]


@pytest.fixture(scope="module", params=["demo", "byte_fallback", *in_campaign("byte_level")])
def vocabulary(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TokenTable:
    if request.param == "demo":
        return demo_vocabulary()
    folder = tmp_path_factory.mktemp("tokenizer")
    makers = {"byte_level": byte_level_vocabulary, "byte_fallback": byte_fallback_vocabulary}
    return makers[request.param](folder)


def outputs(vocabulary: TokenTable, count: int = WALKS, **wanted: Any) -> Iterator[str]:
    """What walks wrote that ended; some must."""
    grammar = compiled(vocabulary, **wanted)
    texts = [walk(vocabulary, grammar, random.Random(seed)) for seed in range(count)]
    ended = [text for text in texts if text is not None]
    assert ended
    yield from ended


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: next(iter(schema)))
@pytest.mark.parametrize("compact", [False, True])
def test_json_is_valid(vocabulary: TokenTable, schema: Any, compact: bool) -> None:
    for text in outputs(vocabulary, json=json.dumps(schema), disable_any_whitespace=compact):
        value = json.loads(text)
        jsonschema.validate(value, schema)
        if compact:
            assert not re.search(r"\s", re.sub(r'"(\\.|[^"\\])*"', "", text))


@pytest.mark.parametrize("schema", ["true", "{}"])
def test_a_schema_of_anything_allows_anything(vocabulary: TokenTable, schema: str) -> None:
    for text in outputs(vocabulary, json=schema):
        json.loads(text)


def test_a_json_object_is_one(vocabulary: TokenTable) -> None:
    for text in outputs(vocabulary, json_object=True):
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("schema", [{"type": "object"}, {"properties": {"a": {"items": {}}}}, True])
def test_a_space_may_follow_a_colon_or_a_comma_and_no_other_white_space_comes(
    vocabulary: TokenTable, schema: Any
) -> None:
    spaced, compact = '{"a": [1, {"b": 2, "c": 3}]}', '{"a":[1,{"b":2,"c":3}]}'
    for flag, texts in ((False, {spaced, compact}), (True, {compact})):
        grammar = compiled(vocabulary, json=json.dumps(schema), disable_any_whitespace=flag)
        for text in (spaced, compact):
            assert follow(vocabulary, grammar.matcher(), text) is (text in texts)
        for odd in ('{"a"\n', '{"a" ', '{"a":\n', '{"a":  ', '{"a":1\n', '{"a":1 ', '{"a":1,\n',
                    '{"a":1,  ', "{\n", "{ ", "\n", '{"a":[ ', '{"a":[1 '):  # fmt: skip
            assert not follow(vocabulary, grammar.matcher(), odd), odd


@pytest.mark.parametrize(
    "options",
    [{"lenient": True}, {"coerce_one_of": True}, {"item_separator": ";"}, {"nonsense": 1}, 5],
)
def test_a_schema_cannot_change_how_it_is_compiled(vocabulary: TokenTable, options: Any) -> None:
    schema = {"x-guidance": options, "type": "array", "items": {"type": "null"}, "minItems": 2}
    matcher = compiled(vocabulary, json=json.dumps(schema)).matcher()
    assert follow(vocabulary, matcher, "[null, null]")


@pytest.mark.parametrize(
    "regex",
    [
        r"[a-f]{2,5}",
        r"a/\d\\\n?\/|[b\n/\t]{3}",
        r"(é|n\x00|😀){1,2}",
        r"^abc$",
        "x\\\ny",
        r'"[^"]{0,3}"',
        r"(?i)abc|(?s:.{2})",
    ],
)
def test_a_regex_is_matched_by_the_whole_output(vocabulary: TokenTable, regex: str) -> None:
    for text in outputs(vocabulary, regex=regex):
        assert re.fullmatch(regex, text)


def test_a_choice_is_one_of_the_texts_and_each_can_be(vocabulary: TokenTable) -> None:
    choice = ["a", "ab", "abc d", 'q"\\/\n\x7f\x00', "é😀", "<|im_end|>", "</s>", "yes\u2028"]
    assert set(outputs(vocabulary, count=60, choice=choice)) <= set(choice)
    grammar = compiled(vocabulary, choice=choice)
    for text in choice:
        matcher = grammar.matcher()
        assert follow(vocabulary, matcher, text)
        assert vocabulary.eos_token_ids & set(allowed(vocabulary, matcher))


def test_a_grammar_is_followed(vocabulary: TokenTable) -> None:
    grammar = 'start: sum\nsum: NUMBER | sum "+" NUMBER | "(" sum ")"\nNUMBER: /[0-9]{1,3}/'
    for text in outputs(vocabulary, grammar=grammar):
        assert re.fullmatch(r"[0-9()+]+", text)
        assert text.count("(") == text.count(")")


TAG = StructuralTag(
    structures=[
        Structure(begin="<fn=a>", schema='{"type":"integer"}', end="</fn>"),
        Structure(begin="<fn=b>", schema='{"enum":["x","y"]}', end="</fn>"),
        Structure(begin="!{", schema='{"type":"null"}', end="}"),
    ],
    triggers=["<fn", "!", "never"],
)


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("some text, 1 < 2", True),
        ('<fn=a>12</fn> and <fn=b>"y"</fn>!{null}', True),
        ("a<fn=a>x", False),
        ("a<fn=c", False),
        ('<fn=b>"y"<', True),
        ('<fn=b>"y"<f', False),
        ("!!", False),
        ("this is nev", True),
        ("this is never", False),
    ],
)
def test_a_trigger_begins_a_structure_and_nothing_else(
    vocabulary: TokenTable, text: str, is_allowed: bool
) -> None:
    assert (
        follow(vocabulary, compiled(vocabulary, structural_tag=TAG).matcher(), text) == is_allowed
    )


def test_an_output_ends_in_free_text_but_not_in_a_structure(vocabulary: TokenTable) -> None:
    matcher = compiled(vocabulary, structural_tag=TAG).matcher()
    assert vocabulary.eos_token_ids & set(allowed(vocabulary, matcher))
    assert follow(vocabulary, matcher, "ab!{nu")
    assert not vocabulary.eos_token_ids & set(allowed(vocabulary, matcher))
    assert follow(vocabulary, matcher, "ll}")
    assert vocabulary.eos_token_ids & set(allowed(vocabulary, matcher))


def test_a_trigger_may_be_a_special_token_or_its_name(tmp_path: Path) -> None:
    vocabulary = byte_fallback_vocabulary(tmp_path)
    tag = StructuralTag(
        structures=[Structure(begin="<tool>{", schema="true", end="<tool>")], triggers=["<tool>"]
    )
    grammar = compiled(vocabulary, structural_tag=tag)
    for by_name in (False, True):
        matcher = grammar.matcher()
        assert follow(vocabulary, matcher, "a")
        assert 4 in allowed(vocabulary, matcher)
        if by_name:
            assert follow(vocabulary, matcher, "<tool>")
        else:
            matcher.append([4])
        assert not follow(vocabulary, matcher, "a")
        assert follow(vocabulary, matcher, "{true")
        assert 4 in allowed(vocabulary, matcher)
        matcher.append([4])
        assert follow(vocabulary, matcher, "free again")
