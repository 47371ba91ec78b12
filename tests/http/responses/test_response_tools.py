"""Tools and tool_choice, as the Responses API has them, to a chat's."""

from __future__ import annotations

from typing import Any

import pytest

from nanocore.http.dialects.responses.response_tools import read_response_tools
from nanocore.http.http_errors import HttpError

ADD: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
SUB: Any = {"type": "function", "name": "sub", "description": None}
PATCH: Any = {
    "type": "custom",
    "name": "patch",
    "description": "Edits.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"},
}
FORM: Any = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}


def test_a_function_has_its_fields_inside_and_is_shown_with_all_of_them() -> None:
    tools = read_response_tools([ADD, SUB], None)
    inside = {"name": "add", "parameters": {"type": "object"}, "strict": True}
    assert tools.tools == [
        {"type": "function", "function": inside},
        {"type": "function", "function": {"name": "sub"}},
    ]
    blank = {"description": None, "parameters": None, "strict": None}
    assert tools.shown[1] == {"type": "function", "name": "sub", **blank}


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    tools = read_response_tools([PATCH], None)
    assert tools.custom == {"patch"}
    assert tools.shown == [PATCH]
    [tool] = tools.tools or []
    function = tool["function"]
    assert function["parameters"]["required"] == ["input"]
    assert function["description"].startswith("Edits.")
    assert "lark grammar:\nstart: X" in function["description"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, None),
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
        ({"type": "custom", "name": "patch"}, {"type": "function", "function": {"name": "patch"}}),
        ({"type": "web_search"}, "auto"),
    ],
)
def test_a_choice_is_a_chats(choice: Any, expected: Any) -> None:
    assert read_response_tools([ADD, PATCH, {"type": "web_search"}], choice).choice == expected


@pytest.mark.parametrize("choice", [{"type": "file_search"}, {"type": ["x"]}, {"type": "x"}, {}])
def test_a_choice_of_nothing_that_is_given_is_refused(choice: Any) -> None:
    with pytest.raises(HttpError, match="tool_choice is none, auto, required, or an object of"):
        read_response_tools([ADD, PATCH, {"type": "web_search"}], choice)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_those_that_the_model_sees(mode: str) -> None:
    allowed = {
        "type": "allowed_tools",
        "mode": mode,
        "tools": [{"type": "function", "name": "sub"}],
    }
    tools = read_response_tools([ADD, SUB], allowed)
    assert [tool["function"]["name"] for tool in tools.tools or []] == ["sub"]
    assert tools.choice == mode
    assert len(tools.shown) == 2


@pytest.mark.parametrize("choice", [None, "auto", "required", {"type": "file_search"}])
def test_where_all_tools_are_dropped_none_is_chosen(choice: Any) -> None:
    given = [{"type": "web_search"}, {"type": "mcp"}, {"type": "mcp"}]
    tools = read_response_tools(given, choice)
    assert (tools.tools, tools.choice, tools.shown) == (None, None, [])
    assert tools.dropped == ["web_search", "mcp"]
