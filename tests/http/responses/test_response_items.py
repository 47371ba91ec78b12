"""Items and tools of /v1/responses, as a conversation has them."""

from __future__ import annotations

from typing import Any

import pytest

from nanocore.http.dialects.responses.response_items import (
    Item,
    ItemReader,
    messages_of,
    read_response_tools,
)
from nanocore.http.http_errors import HttpError

HI: Any = {"role": "user", "content": "hi"}
CALL: Any = {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a":1}'}
RESULT: Any = {"type": "function_call_output", "call_id": "c", "output": "2"}


def read(given: str | list[Any], instructions: str | None = None) -> list[dict[str, Any]]:
    """The messages that they make."""

    def find(item_id: str) -> Item | None:
        return None

    return messages_of(ItemReader("k", find).read(given), instructions)


def call(name: str, arguments: str, call_id: str = "c") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ("hi", [HI]),
        ([HI, {"type": "message", **HI}], [HI, HI]),
        ([{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}], [HI]),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]}],
            [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}],
        ),
        ([{"role": "developer", "content": "a"}, HI], [{"role": "developer", "content": "a"}, HI]),
        (
            [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}, HI],
            [{"role": "system", "content": "a\n\nb"}, HI],
        ),
        ([HI, {"role": "system", "content": "a"}], [HI, {"role": "system", "content": "a"}]),
        (
            [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
            [{"role": "assistant", "content": "no"}],
        ),
        ([HI, {"type": "web_search_call", "id": "ws"}], [HI]),
        (
            [RESULT | {"output": [{"type": "input_text", "text": t} for t in "ab"]}],
            [{"role": "tool", "tool_call_id": "c", "content": "a\nb"}],
        ),
    ],
)
def test_messages_are_read_in_all_their_forms(
    given: str | list[Any], messages: list[dict[str, Any]]
) -> None:
    assert read(given) == messages


def test_instructions_come_first_and_with_what_the_system_says() -> None:
    developer = {"role": "developer", "content": [{"type": "input_text", "text": t} for t in "ab"]}
    assert read([HI], "x") == [{"role": "system", "content": "x"}, HI]
    assert read([developer, HI], "x") == [{"role": "system", "content": "x\n\na\n\nb"}, HI]


def test_what_the_assistant_did_between_two_turns_is_one_turn() -> None:
    thought = {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "short"}],
        "content": [{"type": "reasoning_text", "text": "long"}],
    }
    custom = {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": '"x"'}
    output = {"type": "custom_tool_call_output", "call_id": "d", "output": "done"}
    said = {"type": "message", "role": "assistant", "content": "I call"}
    assert read([HI, thought, said, CALL, custom, RESULT, output, HI]) == [
        HI,
        {
            "role": "assistant",
            "content": "I call",
            "reasoning_content": "long",
            "tool_calls": [call("add", '{"a":1}'), call("patch", '{"input":"\\"x\\""}', "d")],
        },
        {"role": "tool", "tool_call_id": "c", "content": "2", "name": "add"},
        {"role": "tool", "tool_call_id": "d", "content": "done", "name": "patch"},
        HI,
    ]


def test_calls_with_their_results_between_them_are_turns_of_their_own() -> None:
    roles = [message["role"] for message in read([HI, CALL, RESULT, CALL, RESULT])]
    assert roles == ["user", "assistant", "tool", "assistant", "tool"]


def test_a_summary_is_reasoning_where_there_is_no_more_and_a_call_needs_no_text() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]}
    encrypted = {"type": "reasoning", "summary": [], "encrypted_content": "AAAA"}
    [turn] = read([encrypted, thought, CALL])
    assert (turn["reasoning_content"], turn["content"]) == ("short", None)


def test_a_message_or_result_without_content_has_an_empty_text() -> None:
    for lacking in ({}, {"content": None}):
        given = [{"role": "user", **lacking}, {"role": "assistant", **lacking}]
        assert [turn["content"] for turn in read(given)] == ["", ""]
    for lacking in ({"output": None}, {"output": ""}):
        assert read([CALL, RESULT | lacking])[-1]["content"] == ""


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (["hi"], "input[0]"),
        ([HI, {"type": "compaction"}], "input[1].type"),
        ([{"type": ["message"]}], "input[0].type"),
        ([{"role": "tool", "content": "x"}], "input[0].role"),
        ([{"role": "user", "content": 5}], "input[0].content"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0]"),
        ([{"role": "user", "content": [{"type": {}}]}], "input[0].content[0]"),
        ([{"role": "user", "content": ["x"]}], "input[0].content[0]"),
        ([CALL | {"arguments": {}}], "input[0].arguments"),
        ([RESULT | {"call_id": None}], "input[0].call_id"),
        ([RESULT | {"output": {"a": 1}}], "input[0].output"),
        ([{"type": "reasoning", "summary": "x"}], "input[0].summary"),
        ([{"type": "item_reference"}], "input[0].id"),
        ([{"type": "item_reference", "id": "msg_x"}], "input[0].id"),
    ],
)
def test_what_is_no_item_is_refused_where_it_stands(given: list[Any], param: str) -> None:
    with pytest.raises(HttpError) as caught:
        read(given)
    assert caught.value.param == param
    assert caught.value.status in (400, 404)


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
