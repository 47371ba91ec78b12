"""Tools that may be called once: a model that calls twice, in each dialect, whole and streamed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.client.running import run
from tests.http.in_process import app_of

USER = {"role": "user", "content": "x"}
CALL = '<tool_call>\n{{"name": "{}", "arguments": {{"a": 1}}}}\n</tool_call>'
FUNCTION = {"name": "add", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
TWICE = {"regex": re.escape(CALL.format("add") + CALL.format("mul"))}
COMMON = {"temperature": 0, "structured_outputs": TWICE}
CHAT = {"messages": [USER], "tools": [TOOL], "max_tokens": 200}
RESPONSES = {"input": "x", "tools": [{"type": "function", **FUNCTION}], "max_output_tokens": 200}
MESSAGES = {
    "messages": [USER],
    "tools": [{"name": "add", "input_schema": {"type": "object"}}],
    "max_tokens": 200,
}
ONE = {"parallel_tool_calls": False}
AUTO = {"type": "auto", "disable_parallel_tool_use": True}
DIALECTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": (CHAT, ONE),
    "/v1/responses": (RESPONSES, ONE),
    "/v1/messages": (MESSAGES, {"tool_choice": AUTO}),
}
NAME = re.compile(r'"name":\s*"(add|mul)"')


def called(endpoint: str, path: str, body: dict[str, Any]) -> tuple[set[str], str]:
    """The names of the functions that an answer calls, and the answer."""

    async def send() -> str:
        async with app_of(endpoint, tool_parser="hermes") as (_, http):
            answer = await http.post(path, json={**COMMON, **body})
            assert answer.status_code == 200, answer.text
            return str(answer.text)

    text = run(send())
    return {*NAME.findall(text)}, text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", DIALECTS)
def test_of_several_calls_only_the_first_leaves_where_one_is_allowed(
    demo_endpoint: str, path: str, stream: bool
) -> None:
    body, one = DIALECTS[path]
    assert called(demo_endpoint, path, {**body, "stream": stream})[0] == {"add", "mul"}
    names, text = called(demo_endpoint, path, {**body, **one, "stream": stream})
    assert names == {"add"}
    assert any(reason in text for reason in ("tool_calls", "tool_use", "function_call"))
