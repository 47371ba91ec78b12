"""Turns with tools and odd contents, over HTTP with the demo model."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from nanocore.protocol.codec import unpack_int32
from nanocore.protocol.messages import Event
from tests.client.running import run
from tests.http.asgi import app_of
from tests.http.responses.asked import TEMPLATE, Asked, Reply, asked_app

USER = {"role": "user", "content": "hi"}
FUNCTION = {"name": "add", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CHATML = """\
{%- for m in messages %}{{- '<' + m.role + '>' + m.content + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<assistant>' }}{% endif %}"""
KNOWING = CHATML + "{#- of tools -#}"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER], "tools": TOOLS},
    "/v1/responses": {"input": "hi", "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages": {
        "messages": [USER],
        "max_tokens": 100,
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
    },
}


async def answered(asked: Asked, path: str, body: Any, text: str) -> tuple[str, Reply]:
    """The prompt that the engine got, and what the client is answered when it says this."""
    assert asked.app.state.client is not None
    tokenizer = await asked.app.state.client.get_tokenizer()
    asking = asyncio.create_task(asked.request("POST", path, body))
    submit = await asked.engine.accept()
    ids = tokenizer.encode(text + "<|end|>")
    asked.engine.output({1: ids}, Event(handle=1, finish_reason="stop"))
    return tokenizer.decode(unpack_int32(submit.prompt_token_ids).tolist()), await asking


@pytest.mark.parametrize("path", BODIES)
async def test_a_template_without_tools_refuses_them_unless_a_call_is_forced(
    short_path: Path, path: str
) -> None:
    async with asked_app(short_path, template=CHATML) as asked:
        refused = await asked.request("POST", path, BODIES[path])
        assert refused.status == 400
        assert "this model's chat template has no tools" in refused.json()["error"]["message"]
        choice = {"type": "any"} if path == "/v1/messages" else "required"
        body = {**BODIES[path], "tool_choice": choice}
        calls = json.dumps([{"name": "add", "parameters": {"a": 1}}])
        prompt, reply = await answered(asked, path, body, calls)
        assert prompt == "<user>hi\n<assistant>"
        assert reply.headers["nanocore-tool-prompt"] == "none"
        assert reply.status == 200
        assert json.dumps({"a": 1}) in str(reply.json()).replace("'", '"')


@pytest.mark.parametrize(
    ("template", "shown", "parser", "header"),
    [
        (TEMPLATE, "tools: <tool_call> [", "auto", None),
        (KNOWING, "<user>hi\n<assistant>", "auto", "none"),
        (CHATML, "<user>hi\n<assistant>", "pythonic", "none"),
    ],
)
async def test_the_prompt_is_no_more_than_the_template_lacks(
    short_path: Path, template: str, shown: str, parser: str | None, header: str | None
) -> None:
    async with asked_app(short_path, template=template, tool_parser=parser) as asked:
        body = BODIES["/v1/chat/completions"]
        prompt, reply = await answered(asked, "/v1/chat/completions", body, "hello")
        assert prompt.startswith(shown) or prompt.endswith(shown)
        assert prompt == shown or "nanocore" not in prompt
        assert reply.headers.get("nanocore-tool-prompt") == header
        plain = {**body, "tool_choice": "none"}
        prompt, reply = await answered(asked, "/v1/chat/completions", plain, "hello")
        assert "add" not in prompt
        assert "nanocore-tool-prompt" not in reply.headers


async def test_the_demo_model_is_shown_no_tools_and_its_answers_say_so(demo_endpoint: str) -> None:
    async with app_of(demo_endpoint) as (_, http):
        question = {"messages": [{"role": "user", "content": "What is 123 + 456?"}]}
        plain = await http.post("/v1/chat/completions", json=question)
        body = {**question, "tools": TOOLS}
        answer = await http.post("/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"] == "123 + 456 = 579"
        assert answer.headers["nanocore-tool-prompt"] == "none"
        assert "nanocore-tool-prompt" not in plain.headers


@pytest.mark.parametrize("path", BODIES)
async def test_agents_have_hundreds_of_tools_with_long_names(demo_endpoint: str, path: str) -> None:
    body = BODIES[path]
    (tool,) = body["tools"]
    names = [f"mcp__{i:03}__" + "n" * 118 for i in range(300)]
    if "function" in tool:
        tools = [tool | {"function": FUNCTION | {"name": name}} for name in names]
    else:
        tools = [tool | {"name": name} for name in names]
    choice = {"type": "any"} if path == "/v1/messages" else "required"

    async with app_of(demo_endpoint) as (_, http):
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        for chosen in ({}, {"tool_choice": choice}):
            answer = await http.post(path, json={**body, "tools": tools, limit: 200, **chosen})
            assert answer.status_code == 200, answer.text
        assert "mcp__" in answer.text


QUESTION = {"role": "user", "content": "What is 1 + 2?"}
OLD_CALL = {"name": "add", "arguments": "{}"}


def rendered(endpoint: str, turns: list[dict[str, Any]]) -> list[str]:
    """The prompts of conversations with one such turn, which are answered, too."""

    async def send() -> list[str]:
        prompts = []
        async with app_of(endpoint) as (_, http):
            for turn in turns:
                body = {"messages": [QUESTION, turn, QUESTION], "max_tokens": 1}
                answer = await http.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, (turn, answer.text)
                tokens = (await http.post("/tokenize", json=body)).json()["tokens"]
                text = await http.post("/detokenize", json={"tokens": tokens})
                prompts.append(str(text.json()["prompt"]))
        return prompts

    return run(send())


def test_a_turn_without_content_has_an_empty_text(demo_endpoint: str) -> None:
    turns: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "reasoning_content": "t"},
        {"role": "assistant", "reasoning": "t"},
        {"role": "assistant", "content": None, "function_call": OLD_CALL},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "tool_call_id": "c", "content": None},
        {"role": "user", "content": None},
        {"role": "system"},
    ]
    empty: list[dict[str, Any]] = [{"role": turn["role"], "content": ""} for turn in turns]
    assert rendered(demo_endpoint, turns) == rendered(demo_endpoint, empty)


def test_a_refusal_is_the_turns_text(demo_endpoint: str) -> None:
    turns: list[dict[str, Any]] = [
        {"content": [{"type": "refusal", "refusal": "I cannot."}]},
        {"content": None, "refusal": "I cannot."},
        {"content": "I cannot.", "refusal": None},
    ]
    for prompt in rendered(demo_endpoint, [{"role": "assistant", **turn} for turn in turns]):
        assert "assistant\nI cannot.<|im_end|>" in prompt


ANY_CALL = '<tool_call>\n{{"name": "{}", "arguments": {{"a": 1}}}}\n</tool_call>'
TOOL = {"type": "function", "function": FUNCTION}
TWICE = {"regex": re.escape(ANY_CALL.format("add") + ANY_CALL.format("mul"))}
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
