"""/v1/messages with the demo model: what Anthropic's clients send, and what they are answered."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from nanocore.client import AsyncEngineClient
from nanocore.http.app import App
from nanocore.http.server_settings import AppSettings
from tests.client.running import run
from tests.http.asgi import Connection, scope

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
QUESTION = {"role": "user", "content": "What is 123 + 456?"}
ADD = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"const": 123}, "b": {"const": 456}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
SUM = {
    "type": "json_schema",
    "schema": {
        "type": "object",
        "properties": {"sum": {"enum": [579]}},
        "required": ["sum"],
        "additionalProperties": False,
    },
}


def ask(endpoint: str, *bodies: Mapping[str, Any], path: str = PATH) -> list[Connection]:
    """The answers to these requests, one after the other."""

    async def scenario() -> list[Connection]:
        app = App(AppSettings(served_model_names=("demo",)))
        answers = []
        async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
            app.state.client = client
            for body in bodies:
                asked = {"model": "demo", "max_tokens": 40, "messages": [QUESTION], **body}
                connection = Connection(json.dumps(asked).encode())
                request = scope("POST", path, anthropic_version="2023-06-01")
                request["query_string"] = b"beta=true"
                await app(request, connection.receive, connection.send)
                answers.append(connection)
        return answers

    return run(scenario())


def answer(endpoint: str, **body: Any) -> Any:
    """That of one request, which is served."""
    (one,) = ask(endpoint, body)
    assert one.status == 200, one.body
    return one.json


def streamed(endpoint: str, **body: Any) -> list[Any]:
    """The events of a stream."""
    (one,) = ask(endpoint, {**body, "stream": True})
    assert (one.status, one.headers[b"content-type"][:17]) == (200, b"text/event-stream")
    lines = one.body.decode().split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


def refusal(endpoint: str, **body: Any) -> str:
    """Why one is not served."""
    (one,) = ask(endpoint, body)
    assert one.status == 400, one.body
    assert (one.json["type"], one.json["error"]["type"]) == ("error", "invalid_request_error")
    assert one.headers[b"request-id"] == one.headers[b"x-request-id"]
    return str(one.json["error"]["message"])


def test_a_question_is_answered_whole_and_streamed(demo_endpoint: str) -> None:
    message = answer(demo_endpoint)
    assert message["content"] == [{"type": "text", "text": "123 + 456 = 579"}]
    assert (message["role"], message["model"], message["stop_reason"]) == (
        "assistant", "demo", "end_turn",
    )  # fmt: skip
    events = streamed(demo_endpoint)
    deltas = [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(deltas) == "123 + 456 = 579"
    assert len(deltas) > 1
    assert events[-1] == {"type": "message_stop"}


def test_counted_tokens_are_those_of_the_prompt_cached_ones_included(demo_endpoint: str) -> None:
    bodies: list[dict[str, Any]] = [
        {},
        {"system": [{"type": "text", "text": "Be brief."}], "tools": [ADD]},
        {"messages": [QUESTION, {"role": "assistant", "content": "123 + "}]},
    ]
    counted = [one.json for one in ask(demo_endpoint, *bodies, path=COUNT)]
    for body, count in zip(bodies, counted, strict=True):
        for one in ask(demo_endpoint, body, body):  # the second time it is in the cache
            usage = one.json["usage"]
            prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
            assert count == {"input_tokens": prompt}


def test_max_tokens_beyond_the_room_are_cut(demo_endpoint: str) -> None:
    assert answer(demo_endpoint, max_tokens=32000)["stop_reason"] == "end_turn"
    cut = answer(demo_endpoint, max_tokens=4)
    assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 4)


def test_a_stop_sequence_is_named_and_not_shown(demo_endpoint: str) -> None:
    message = answer(demo_endpoint, stop_sequences=["zzz", "= "])
    assert message["content"][0]["text"] == "123 + 456 "
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "= ")
    last = streamed(demo_endpoint, stop_sequences=["zzz", "= "])[-2]
    assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "= "}


def test_an_answer_goes_on_where_the_assistant_was_left(demo_endpoint: str) -> None:
    prefill = {"role": "assistant", "content": [{"type": "text", "text": "123 + 456 ="}]}
    message = answer(demo_endpoint, messages=[QUESTION, prefill])
    assert message["content"][0]["text"] == " 579"


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "add"}, {"type": "any"}])
def test_a_forced_tool_is_called(demo_endpoint: str, choice: dict[str, Any]) -> None:
    choice |= {"disable_parallel_tool_use": True}
    message = answer(demo_endpoint, tools=[ADD], tool_choice=choice, max_tokens=100)
    (call,) = message["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 123, "b": 456})
    assert message["stop_reason"] == "tool_use"
    events = streamed(demo_endpoint, tools=[ADD], tool_choice=choice, max_tokens=100)
    pieces = [e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta"]
    assert json.loads("".join(pieces)) == {"a": 123, "b": 456}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_a_tools_result_is_read(demo_endpoint: str) -> None:
    call = {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 123, "b": 456}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "579"}
    messages = [
        QUESTION,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "What is 1 + 2?"}]},
    ]
    assert answer(demo_endpoint, messages=messages)["content"][0]["text"] == "1 + 2 = 3"


@pytest.mark.parametrize("field", [{"output_config": {"format": SUM}}, {"output_format": SUM}])
def test_an_answer_is_held_to_a_schema(demo_endpoint: str, field: dict[str, Any]) -> None:
    text = answer(demo_endpoint, **field)["content"][0]["text"]
    assert json.loads(text) == {"sum": 579}


def test_beside_tools_an_answer_is_held_to_the_schema_too(demo_endpoint: str) -> None:
    asked = {"tools": [ADD], "output_config": {"format": SUM}}
    free, held = ask(demo_endpoint, asked, {**asked, "tool_choice": {"type": "none"}})
    for one in (free, held):
        assert json.loads(one.json["content"][0]["text"]) == {"sum": 579}
        assert b"nanocore-ignored" not in one.headers


def test_what_coding_agents_send_is_served_and_what_of_it_has_no_effect_is_named(
    demo_endpoint: str,
) -> None:
    (one,) = ask(
        demo_endpoint,
        {
            "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}],
            "tools": [ADD, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "adaptive", "display": "omitted"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "metadata": {"user_id": "u"},
            "max_tokens": 32000,
        },
    )
    assert one.status == 200
    assert one.json["content"] == [{"type": "text", "text": "123 + 456 = 579"}]
    ignored = b"context_management, tools[web_search_20250305]"
    assert one.headers[b"nanocore-ignored"] == ignored
    assert one.headers[b"request-id"] == one.headers[b"x-request-id"]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"n": 2}, "n is not supported"),
        ({"repetition_detection": {"max_pattern_size": 2, "min_count": 2}}, "is not supported"),
        ({"tool_choice": {"type": "any"}}, "no client tools"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "not one of the tools"),
        ({"tools": [{"name": "bad name"}]}, "name"),
        ({"output_format": {"type": "json_object"}}, "an output format is"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "text only"),
    ],
)
def test_what_cannot_be_served_is_refused_in_anthropics_shape(
    demo_endpoint: str, body: dict[str, Any], word: str
) -> None:
    assert word in refusal(demo_endpoint, **body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_agents_know(
    demo_endpoint: str, stream: bool
) -> None:
    long = {"role": "user", "content": "1 " * 3000}
    message = refusal(demo_endpoint, messages=[long], stream=stream)
    assert message.startswith("prompt is too long: 6008 tokens > 2048 maximum")
