"""Tools and tool_choice: OpenAI's shapes, checked, and the schema of forced calls."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from nanocore.client.chat.tools import (
    MAX_TOOLS,
    ToolChoice,
    arguments_schema,
    calls_schema,
    read_tool_choice,
    read_tools,
)
from nanocore.protocol.errors import InvalidRequestError


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"type": "null"}}}
LIST = {
    "type": "object",
    "properties": {"head": {"$ref": "#/$defs/node"}, "again": {"$ref": "#"}},
    "required": ["head"],
    "additionalProperties": False,
    "$defs": {"node": NODE | {"additionalProperties": False}},
}
NAMES = ("default", "enum", "const", "examples", "$ref", "properties")
NAMED = {
    "properties": {name: {"$ref": "#/$defs/two"} for name in NAMES},
    "$defs": {"two": {"enum": [1, 2]}},
}
DATA = {"properties": {"$ref": {"const": {"$ref": "#/data"}}}, "required": ["$ref"]}
TOOLS = read_tools([tool("list", **LIST), tool("data", **DATA), {"function": {"name": "bare"}}])


@pytest.mark.parametrize(
    ("choice", "tools", "mode"),
    [
        (None, TOOLS, "auto"), (None, [], "none"), ("auto", TOOLS, "auto"), ("auto", [], "none"),
        ("none", TOOLS, "none"), ("none", [], "none"), ("required", TOOLS, "required"),
    ],
)  # fmt: skip
def test_a_choice_in_words(choice: Any, tools: Any, mode: str) -> None:
    assert read_tool_choice(choice, tools) == ToolChoice(mode)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "function": {"name": "data"}},
        {"type": "function", "name": "data"},
        {"function": {"name": "data"}},
    ],
)
def test_a_tool_is_chosen_by_its_name(choice: Any) -> None:
    assert read_tool_choice(choice, TOOLS) == ToolChoice("named", TOOLS[1])


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("required", "needs tools"),
        (
            {"type": "function", "function": {"name": "x"}},
            "'x', which is not one of the tools: there",
        ),
        ("any", "not 'any'"),
        (5, "not 5"),
        ({"type": "tool", "name": "data"}, "not {'type': 'tool'"),
        ({"type": "function", "function": 5}, "tool_choice is"),
        ({}, "tool_choice is"),
    ],
)
def test_a_choice_that_is_none_is_refused(choice: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        read_tool_choice(choice, [])


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        ("search", "not str"),
        ({"name": "f"}, "not dict"),
        (5, "not int"),
        ([5], r"tools\[0\] must be"),
        ([tool("f"), {"type": "web_search"}], r"tools\[1\] must be"),
        ([{"type": "function"}], r"tools\[0\] must be"),
        ([tool("")], "name=''"),
        ([tool("a b")], "name='a b'"),
        ([tool("f\n")], r"name='f\\n'"),
        ([tool("<|im_end|>")], "letters, digits"),
        ([tool("a" * 129)], "1 to 128"),
        ([{"function": {"name": None}}], "name=None"),
        ([{"function": {"name": "f", "parameters": [1]}}], r"must be an object, not \[1\]"),
        ([tool("f"), tool("g"), tool("f")], "two tools have the name 'f'"),
        ([tool(f"f{i}") for i in range(MAX_TOOLS + 1)], "1025 tools"),
    ],
)
def test_tools_of_another_shape_are_refused_by_place(tools: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        read_tools(tools)


def test_no_tools_are_an_empty_list_and_arguments_an_object() -> None:
    assert read_tools(None) == read_tools([]) == []

    assert [arguments_schema(tool)["type"] for tool in TOOLS] == ["object"] * 3


def test_properties_may_be_named_as_keywords_are() -> None:
    validator = jsonschema.Draft202012Validator(
        calls_schema(read_tools([tool("f", **NAMED)]), True)
    )
    for name in NAMES:
        for value in (2, 3):
            call = {"name": "f", "parameters": {name: value}}
            assert validator.is_valid([call]) is (value == 2), call


@pytest.mark.parametrize("parallel", [True, False])
def test_forced_calls_match_the_schemas_of_their_tools(parallel: bool) -> None:
    schema = calls_schema(TOOLS, parallel)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    head = {"next": {"next": {"v": None}}}
    good = [
        {"name": "list", "parameters": {"head": head, "again": {"head": {}}}},
        {"name": "data", "parameters": {"$ref": {"$ref": "#/data"}}},
        {"name": "bare", "parameters": {}},
    ]
    bad: list[Any] = [
        {"name": "list", "parameters": {"head": {"other": 1}}},
        {"name": "list", "parameters": {"head": {}, "again": {}}},
        {"name": "data", "parameters": {"$ref": {"$ref": "#/$defs/data/data"}}},
        {"name": "other", "parameters": {}},
        {"name": "bare"},
        {"name": "bare", "parameters": 5},
    ]
    for call in good:
        assert validator.is_valid([call]), call
    for call in bad:
        assert not validator.is_valid([call]), call
    assert not validator.is_valid([])
    assert validator.is_valid(good) is parallel
