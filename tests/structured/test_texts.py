"""Which texts expressions, choices, grammars and structural tags let through, to the byte.

A text is let through if each of its tokens is in its mask, and an end in the last one.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.structured.walks import EOS, accepts, allowed_tokens, demo_tokens

REGEXES: dict[str, tuple[list[str], list[str]]] = {
    r"abc": (["abc"], ["", "ab", "abcd", "xabc"]),
    r"a|bc": (["a", "bc"], ["abc", "ac", "b"]),
    r"a*": (["", "aaaa"], ["b", "ab"]),
    r"[a-c]{2,3}": (["ab", "ccc"], ["a", "abca", "ad"]),
    r"[^a]": (["b", "é", "\n", "😀"], ["a", "bb", ""]),
    r".": (["a", "漢", " "], ["\n", "ab", ""]),
    r"(?s:.)": (["\n", "a"], ["ab"]),
    r"(?i:yes|no)": (["YES", "No"], ["yess", "n"]),
    r"\d{3}-\d{4}": (["555-0199", "\u0665\u0665\u0665-0199"], ["5550199", "555-019"]),
    r"\w+\s\w+": (["Anna Bell", "a\tb"], ["Anna", "Anna  Bell"]),
    r"(ab?){2}c": (["abac", "aac"], ["abc", "ababab"]),
    r"(\+|-)?[0-9]+(\.[0-9]+)?": (["-1", "+2.50", "007"], ["1.", ".5", "--1"]),
    r'"[^"]*"': (['"a b"', '""'], ['"a', '"a"b"', "a"]),
    r"a/b\\c": ([r"a/b\c"], [r"a/b/c"]),
    "tab\tand\nline": (["tab\tand\nline"], ["tab and line"]),
    r"[äöü]{2}|ß": (["äü", "ß"], ["ä", "a", "ßß"]),
    r"[😀-😎]": (["😀", "😃"], ["😺", "☺"]),
    r"\$\{[a-z]+\}": (["${home}"], ["${}", "$home"]),
}
CHOICES: list[tuple[list[str], list[str], list[str]]] = [
    (["yes", "no"], ["yes", "no"], ["", "y", "yesno", "Yes", "yes "]),
    (["a", "ab", "abc"], ["a", "ab", "abc"], ["abcd", "b"]),
    (["a.b", "a*"], ["a.b", "a*"], ["aXb", "aa", "a"]),
    (['"', "\\", "\n", "/", "|"], ['"', "\\", "\n", "/", "|"], ["\\n", '""', ""]),
    (["é", "漢字", "😀"], ["é", "漢字", "😀"], ["e", "漢"]),
    (["same", "same"], ["same"], ["samesame"]),
    (["start", "%import", "(x)"], ["start", "%import", "(x)"], ["x", "import"]),
    ([f"label {i}" for i in range(300)], ["label 0", "label 299"], ["label 300", "label"]),
]
GRAMMARS: list[tuple[str, list[str], list[str]]] = [
    ('start: "a" | "b" start', ["a", "bba"], ["b", "ab"]),
    ('start: "(" start ")" | "x"', ["x", "((x))"], ["(x", "((x)", "()"]),
    ('start: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/', ["1", "1+22+3"], ["1+", "+1", "1 + 2"]),
    ('start: NAME "=" NAME\nNAME: /[a-z]+/\n%ignore / +/', ["a=b", "a = b"], ["a=", "a=B"]),
    (
        'start: term (("+"|"-") term)*\nterm: NUMBER | "(" start ")"\nNUMBER: /[0-9]{1,3}/',
        ["1-(2+3)", "((4))"],
        ["1-(2+3", "1234"],
    ),
    (
        'start: "SELECT " NAME " FROM " NAME (" WHERE " NAME "=" NUMBER)?\n'
        "NAME: /[a-z_]+/\nNUMBER: /[0-9]+/",
        ["SELECT a FROM b", "SELECT a FROM b WHERE c=1"],
        ["SELECT a", "SELECT a FROM b WHERE c", "select a FROM b"],
    ),
    ('start: %json {"type": "integer"} "!"', ["12!", "-3!"], ["12", "1.5!"]),
]
JSON_OBJECTS = (
    ["{}", '{"a":1}', '{"a":{"b":[true,null]}}', '{"é":"\\n"}', '{"a": 1}'],
    ["", "[]", "1", '"a"', '{"a":1', "{'a':1}", '{"a":1,}', '{"a":01}', '{"a":NaN}', "{}{}"],
)
TAG: dict[str, Any] = {
    "structures": [
        {
            "begin": "<tool=add>",
            "schema": {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
                "additionalProperties": False,
            },
            "end": "</tool>",
        },
        {"begin": "<tool=say>", "schema": {"type": "string"}, "end": "</tool>"},
    ],
    "triggers": ["<tool="],
}
TAGGED = (
    [
        "",
        "no tool at all, < tool",
        '<tool=add>{"a":1}</tool>',
        'First: <tool=add>{"a":1}</tool> then <tool=say>"hi"</tool>.',
        '<tool=say>"<tool="</tool>',
    ],
    [
        "<tool=",
        "<tool=add>",
        '<tool=add>{"a":1}',
        '<tool=add>{"b":1}</tool>',
        '<tool=sub>{"a":1}</tool>',
        '<tool=add>"hi"</tool>',
        'free <tool=say>"hi"</too>',
    ],
)
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    *(({"regex": regex}, good, bad) for regex, (good, bad) in REGEXES.items()),
    *(({"choice": choice}, good, bad) for choice, good, bad in CHOICES),
    *(({"grammar": grammar}, good, bad) for grammar, good, bad in GRAMMARS),
    ({"json_object": True}, *JSON_OBJECTS),
    ({"structural_tag": TAG}, *TAGGED),
]


def possible(wanted: dict[str, Any], texts: list[str]) -> list[str]:
    """Those of the texts that masks let through."""
    grammar = demo_tokens().compile(**wanted)
    encode = demo_tokens().tokenizer.encode
    return [text for text in texts if accepts(grammar, encode(text).ids)]


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    CASES,
    ids=[f"{i}-{next(iter(case[0]))}" for i, case in enumerate(CASES)],
)
def test_masks_let_through_what_is_wanted_and_nothing_else(
    wanted: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    assert possible(wanted, good + bad) == good


@pytest.mark.parametrize(("text", "is_compact"), [('{"a":[1,2]}', True), ('{"a": [1, 2]}', False)])
def test_spaces_are_possible_unless_they_are_forbidden(text: str, is_compact: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array"}}}
    assert possible({"json": schema}, [text]) == [text]
    compact = {"json": schema, "disable_any_whitespace": True}
    assert possible(compact, [text]) == ([text] if is_compact else [])


@pytest.mark.parametrize("name", ["<|im_start|>", "<|im_end|>"])
@pytest.mark.parametrize("wanted", ["regex", "choice", "const", "property"])
def test_the_name_of_a_special_token_is_text_where_a_text_must_have_it(
    wanted: str, name: str
) -> None:
    """The token itself is in no mask: if it ends an output, that would end within a text."""
    text, params = {
        "regex": (f"a{name}", {"regex": "a" + re.escape(name)}),
        "choice": (f"{name}b", {"choice": [f"{name}b"]}),
        "const": (f'"{name}"', {"json": {"const": name}}),
        "property": (
            f'{{"{name}":1}}',
            {"json": {"type": "object", "properties": {name: {"const": 1}}, "required": [name]}},
        ),
    }[wanted]
    grammar = demo_tokens().compile(**params)
    bytewise = [token for char in text for token in demo_tokens().tokenizer.encode(char).ids]
    assert accepts(grammar, bytewise)
    for i in range(len(bytewise)):
        matcher = grammar.matcher()
        matcher.append(bytewise[:i])
        assert (
            allowed_tokens(matcher).min() > EOS
        )  # the special tokens come first in this vocabulary


def test_white_space_is_no_endless_way_out() -> None:
    assert possible({"json": {"type": "array"}}, ["[" + " " * 200 + "]"]) == []
    assert possible({"json": {"type": "integer"}}, ["1" + "\n" * 200]) == []
