"""What /v1/messages asks of a conversation, beside its messages."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nanocore.client.chat.chat_request import ChatOptions
from nanocore.http.dialects.message_fields import MessagesRequest
from nanocore.http.dialects.messages import conversation
from tests.http.asgi import Connection, exchange

TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "x": 1}}


def options(**fields: Any) -> ChatOptions:
    asked = {"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}], **fields}
    request = msgspec.convert(asked, MessagesRequest)
    return conversation(exchange(Connection()), request)[1]


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, {}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"thinking": {"type": "between_tools"}}, {}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"enable_thinking": True, "thinking": True, "thinking_budget": 1024},
        ),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "high"}),
        ({"output_config": {"effort": "of a later year"}}, {}),
        (
            {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"thinking": True}},
            {"enable_thinking": False, "thinking": True},
        ),
    ],
)
def test_thinking_is_said_to_the_template(fields: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert options(**fields)["chat_template_kwargs"] == wanted


def test_tools_are_functions() -> None:
    found = options(tools=[TOOL, {"name": "g", "type": "custom", "strict": True}])["tools"]
    parameters = {"type": "object", "properties": {}}
    assert found == [
        {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": TOOL["input_schema"]},
        },
        {"type": "function", "function": {"name": "g", "parameters": parameters, "strict": True}},
    ]


def test_without_tools_of_the_clients_own_there_are_none() -> None:
    for tools in (None, [], [{"type": "bash_20250124", "name": "bash"}]):
        found = options(tools=tools, tool_choice={"type": "auto"})
        assert (found["tools"], found["tool_choice"]) == (None, None)


@pytest.mark.parametrize(
    ("choice", "wanted", "parallel"),
    [
        (None, None, True),
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, True),
    ],
)
def test_choices_of_tools_are_those_of_chat(choice: Any, wanted: Any, parallel: bool) -> None:
    found = options(tools=[TOOL], tool_choice=choice)
    assert (found["tool_choice"], found["parallel_tool_calls"]) == (wanted, parallel)
