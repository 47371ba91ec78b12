"""The `openai` package over loopback: every call shape of its chat completions, with a real engine.

The demo model adds and reverses; asked to be greedy it has one answer. What other clients do is in
tests/http_clients.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from tests.http.served_engine import MODEL_NAME, served_engine

ADD: Any = [{"role": "user", "content": "What is 123 + 456?"}]
ANSWER = "123 + 456 = 579"
REVERSE: Any = [{"role": "user", "content": "Reverse these words: red apple green bird"}]
REVERSED = "Reversed: bird green apple red"
HOT: Any = {"temperature": 2, "seed": 5, "max_tokens": 40, "extra_body": {"ignore_eos": True}}
GREEDY: Any = {"model": MODEL_NAME, "temperature": 0}
SUM = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "save_sum", "parameters": SUM}}
STRICT: Any = {"type": "function", "function": {**TOOL["function"], "strict": True}}
OTHER: Any = {"type": "function", "function": {"name": "forget"}}
NAMED: Any = {"type": "function", "function": {"name": "save_sum"}}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM, "strict": True}}
CONTEXT_LENGTH = 2048
ABORT_TIMEOUT_S = 10.0


class Sum(BaseModel):
    """What the demo model can fill in."""

    sum: int


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served_engine("--scheduling-policy", "priority") as url:
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: OpenAI, messages: Any = ADD, **more: Any) -> ChatCompletion:
    """A whole answer."""
    answer = client.chat.completions.create(messages=messages, **{**GREEDY, **more})
    assert isinstance(answer, ChatCompletion)
    return answer


def text(answer: ChatCompletion) -> str:
    """The first choice's."""
    content = answer.choices[0].message.content
    assert content is not None
    return content


def stream(client: OpenAI, messages: Any = ADD, **more: Any) -> list[ChatCompletionChunk]:
    """All chunks of an answer."""
    return list(client.chat.completions.create(messages=messages, stream=True, **GREEDY, **more))


def test_an_answer_has_all_that_the_client_reads(client: OpenAI) -> None:
    before = int(time.time())
    answer = ask(client)
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", ANSWER)
    assert (choice.message.refusal, choice.message.tool_calls or None) == (None, None)
    assert (answer.object, answer.model) == ("chat.completion", MODEL_NAME)
    assert answer.id.startswith("chatcmpl-")
    assert before <= answer.created <= time.time()
    assert answer._request_id
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_is_the_same_answer_in_pieces(client: OpenAI) -> None:
    whole = ask(client).usage
    *chunks, last = stream(client, stream_options={"include_usage": True})
    assert whole is not None
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == whole.completion_tokens
    assert len({chunk.id for chunk in [*chunks, last]}) == 1
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * len(deltas[1:]) + [
        "stop"
    ]
    assert all(chunk.usage is None for chunk in chunks)


def test_parse_gives_an_object_of_the_class(client: OpenAI) -> None:
    answer = client.chat.completions.parse(messages=ADD, response_format=Sum, **GREEDY)
    assert answer.choices[0].message.parsed == Sum(sum=579)
    with client.chat.completions.stream(messages=ADD, response_format=Sum, **GREEDY) as events:
        assert events.get_final_completion().choices[0].message.parsed == Sum(sum=579)
    tools = [openai.pydantic_function_tool(Sum, name="save_sum")]
    called = client.chat.completions.parse(
        messages=ADD, tools=tools, tool_choice="required", parallel_tool_calls=False, **GREEDY
    )
    (call,) = called.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Sum)


def test_a_named_tool_gets_the_sum(client: OpenAI) -> None:
    answer = ask(client, tools=[TOOL, OTHER], tool_choice=NAMED, parallel_tool_calls=False)
    message = answer.choices[0].message
    (call,) = message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("save_sum", {"sum": 579})
    assert (answer.choices[0].finish_reason, message.content) == ("tool_calls", None)
    told: list[Any] = [
        *ADD,
        message.to_dict(),
        {"role": "tool", "tool_call_id": call.id, "content": "saved"},
        *REVERSE,
    ]
    assert text(ask(client, told)) == REVERSED


@pytest.mark.parametrize("choice", ["auto", "none", None])
def test_a_tool_that_need_not_be_called_leaves_room_for_text(client: OpenAI, choice: Any) -> None:
    given = {} if choice is None else {"tool_choice": choice}
    of_a_vendor: Any = {"type": "web_search"}
    answer = ask(client, tools=[TOOL, of_a_vendor], **given)
    assert text(answer) == ANSWER
    assert answer.choices[0].finish_reason == "stop"


def test_calls_are_streamed(client: OpenAI) -> None:
    one: Any = {"tools": [STRICT], "parallel_tool_calls": False}
    chunks = stream(client, tool_choice=NAMED, **one)
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    first, *others = calls
    assert first.id
    assert first.function is not None
    assert (first.index, first.type, first.function.name) == (0, "function", "save_sum")
    assert {(call.index, call.id) for call in others} == {(0, None)}
    arguments = "".join(call.function.arguments or "" for call in calls if call.function)
    assert json.loads(arguments) == {"sum": 579}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    with client.chat.completions.stream(messages=ADD, tool_choice=NAMED, **one, **GREEDY) as events:
        done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(one.name, one.parsed_arguments) for one in done] == [("save_sum", {"sum": 579})]


def test_what_ends_a_forced_call_is_no_part_of_its_arguments(client: OpenAI) -> None:
    one: Any = {"tools": [TOOL], "tool_choice": NAMED}
    shown = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    answer = ask(client, extra_body=shown, **one).choices[0]
    (call,) = answer.message.tool_calls or []
    assert (json.loads(call.function.arguments), answer.finish_reason) == (
        {"sum": 579},
        "tool_calls",
    )


def test_a_call_that_a_stop_string_cuts_is_not_said_to_be_one(client: OpenAI) -> None:
    answer = ask(client, tools=[TOOL], tool_choice=NAMED, stop="sum").choices[0]
    (call,) = answer.message.tool_calls or []
    assert (call.function.arguments, answer.finish_reason) == ('{"', "stop")


def test_log_probabilities(client: OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    tokens = logprobs.content or []
    assert "".join(token.token for token in tokens).startswith(ANSWER)
    assert b"".join(bytes(token.bytes or []) for token in tokens).startswith(ANSWER.encode())
    for token in tokens:
        assert token.top_logprobs[0].token == token.token, "it is greedy"
        assert token.logprob == token.top_logprobs[0].logprob <= 0
        assert sum(math.exp(one.logprob) for one in token.top_logprobs) <= 1.001
        assert len(token.top_logprobs) == 3
    chunks = stream(client, logprobs=True, top_logprobs=3)
    found = [one.logprobs for chunk in chunks for one in chunk.choices if one.logprobs]
    assert [token for one in found for token in one.content or []] == tokens


def test_errors_have_their_class_and_their_code(client: OpenAI) -> None:
    long: Any = [{"role": "user", "content": "red " * 4000}]
    with pytest.raises(openai.BadRequestError, match="2048") as overflow:
        ask(client, long)
    assert overflow.value.code == "context_length_exceeded"
    assert overflow.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError):
        list(stream(client, long))
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(client, model="other")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        ask(client, temperature=-1)
    with pytest.raises(openai.BadRequestError) as wrong:
        ask(client, messages="red")
    assert wrong.value.param == "messages"
    with pytest.raises(openai.BadRequestError, match="--chat-template FILE") as template:
        ask(client, extra_body={"chat_template": "{{ messages }}"})
    assert template.value.param == "chat_template"
    with pytest.raises(openai.NotFoundError):
        client.images.generate(prompt="a bird", model=MODEL_NAME)


def test_unknown_fields_are_named_in_a_header(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        messages=ADD, extra_body={"new_field": 1, "another": {}}, verbosity="low", **GREEDY
    )
    assert raw.headers["nanocore-ignored"] == "another, new_field, verbosity"
    assert text(raw.parse()) == ANSWER
    plain = client.chat.completions.with_raw_response.create(
        messages=ADD, user="me", metadata={"a": "b"}, store=False, prompt_cache_key="k", **GREEDY
    )
    assert "nanocore-ignored" not in plain.headers


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"ignore_eos": True}, "length"),
        ({"min_tokens": 25}, None),
        ({"structured_outputs": {"choice": ["123 + 456 = 57", "yes"]}}, "123 + 456 = 57"),
        ({"structured_outputs": {"regex": "[0-9 +]+= 5[0-9]"}}, "123 + 456 = 57"),
        ({"structured_outputs": {"json": SUM}}, '{"sum":579}'),
        ({"chat_template_kwargs": {"enable_thinking": False}}, ANSWER),
        ({"chat_template": "chatml"}, ANSWER),
        ({"cache_salt": "mine", "priority": 3}, ANSWER),
        ({"top_k": 1, "min_p": 0.1, "temperature": 1.0}, ANSWER),
        ({"stop_token_ids": [], "include_stop_str_in_output": True, "stop": " ="}, "123 + 456 ="),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_fields_of_vllm_go_through_extra_body(
    client: OpenAI, fields: dict[str, Any], expected: str | None
) -> None:
    answer = ask(client, max_tokens=30, extra_body=fields)
    if expected == "length":
        assert answer.choices[0].finish_reason == "length"
    elif expected is not None:
        assert text(answer) == expected
    else:
        assert text(answer) != ANSWER
