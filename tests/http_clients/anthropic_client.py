"""anthropic: messages whole and streamed, tools, structured outputs, count_tokens, models."""

from __future__ import annotations

from typing import Any

import anthropic
from expected import ANSWER, MODEL, SCHEMA, SUM, URL, ask, refused
from pydantic import BaseModel

GREEDY: Any = {"model": MODEL, "max_tokens": 64, "extra_body": {"temperature": 0}}
TOOL: Any = {"name": "save_sum", "description": "Keeps it.", "input_schema": SCHEMA}
NAMED: Any = {"type": "tool", "name": "save_sum", "disable_parallel_tool_use": True}


class Sum(BaseModel):
    """What the model can fill in."""

    sum: int


def texts(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(messages=ask(), **GREEDY)
    (block,) = whole.content
    assert block.type == "text"
    assert block.text == ANSWER
    assert (whole.stop_reason, whole.role, whole.model) == ("end_turn", "assistant", MODEL)
    counted = client.messages.count_tokens(messages=ask(), model=MODEL).input_tokens
    usage = whole.usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    cut = client.messages.create(messages=ask(), **{**GREEDY, "max_tokens": 3})
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    stopped = client.messages.create(messages=ask(), stop_sequences=[" ="], **GREEDY)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " =")
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    blocks: Any = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert client.messages.create(messages=blocks, system=system, **GREEDY).content
    large: Any = {**GREEDY, "max_tokens": 4000}
    assert client.messages.create(messages=ask(), **large).stop_reason == "end_turn"


def streams(client: anthropic.Anthropic) -> None:
    events = list(client.messages.create(messages=ask(), stream=True, **GREEDY))
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop"), kinds
    with client.messages.stream(messages=ask(), **GREEDY) as stream:
        assert "".join(stream.text_stream) == ANSWER
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens > 3


def tools(client: anthropic.Anthropic) -> None:
    one: Any = {"tools": [TOOL], "tool_choice": NAMED}
    called = client.messages.create(messages=ask(), **one, **GREEDY)
    (block,) = called.content
    assert block.type == "tool_use"
    assert (block.name, block.input, called.stop_reason) == ("save_sum", {"sum": SUM}, "tool_use")
    with client.messages.stream(messages=ask(), **one, **GREEDY) as stream:
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use"
    assert streamed.input == {"sum": SUM}
    result: Any = {"type": "tool_result", "tool_use_id": block.id, "content": "saved"}
    text: Any = {"type": "text", "text": ask()[0]["content"]}
    told: Any = [
        *ask(),
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result, text]},
    ]
    answer = client.messages.create(messages=told, tools=[TOOL], **GREEDY)
    assert answer.content


def formats(client: anthropic.Anthropic) -> None:
    parsed = client.messages.parse(messages=ask(), output_format=Sum, **GREEDY)
    assert parsed.parsed_output == Sum(sum=SUM), parsed


def errors(client: anthropic.Anthropic) -> None:
    create = client.messages.create
    unknown: Any = {"messages": ask(), **GREEDY, "model": "other"}
    error = refused(anthropic.NotFoundError, create, **unknown)
    assert error.body["error"]["type"] == "not_found_error", error.body
    too_long = refused(anthropic.BadRequestError, create, messages=ask("red " * 4000), **GREEDY)
    assert "2048" in str(too_long)


with anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0) as client:
    assert [model.id for model in client.models.list()] == [MODEL]
    for part in (texts, streams, tools, formats, errors):
        part(client)
