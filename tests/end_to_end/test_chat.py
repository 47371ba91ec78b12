"""Chats with a real engine: forced calls, response formats, reasoning before a form, failures."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from nanocore.client import (
    LLM,
    AsyncEngineClient,
    EngineDeadError,
    SamplingParams,
    StructuredOutputsParams,
    collect,
)
from nanocore.client.chat.events import ChatAnswer, Failed, Started
from nanocore.demo_model import demo_model_folder
from nanocore.protocol.structured_outputs import ReasoningMarks
from tests.end_to_end.forked import Engine, engine

pytestmark = pytest.mark.usefixtures("forked_launches")

DEMO = demo_model_folder()
GREEDY = SamplingParams(temperature=0, max_tokens=200)
QUESTION: Any = [{"role": "user", "content": "What is 250 + 329?"}]
SUM = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "required": ["root"],
    "additionalProperties": False,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"leaf": {"type": "boolean"}, "next": {"$ref": "#/$defs/node"}},
            "required": ["leaf"],
            "additionalProperties": False,
        }
    },
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in (("save_sum", SUM), ("plant.tree-1", TREE))
]
SCHEMAS = {"save_sum": SUM, "plant.tree-1": TREE}
LESS_THAN = Tokenizer.from_file(str(DEMO / "tokenizer.json")).token_to_id("<")
FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM}}


@pytest.fixture(scope="module")
def running() -> Iterator[Engine]:
    with engine(DEMO) as running:
        yield running


def ask(running: Engine, *requests: dict[str, Any]) -> list[ChatAnswer]:
    """The first answers to these chats, asked at once."""

    async def main() -> list[ChatAnswer]:
        async with AsyncEngineClient.connect(running.endpoint, timeout_s=60) as client:

            async def one(request: dict[str, Any]) -> list[ChatAnswer]:
                params = request.pop("params", GREEDY)
                return await collect(client.chat(QUESTION, params, **request))

            answers = await asyncio.gather(*map(one, requests))
            return [answer for several in answers for answer in several]

    return asyncio.run(main())


def test_a_tool_that_must_be_called_gets_the_sum(running: Engine) -> None:
    chosen = {"type": "function", "function": {"name": "save_sum"}}
    (answer,) = ask(running, {"tools": TOOLS, "tool_choice": chosen})
    (call,) = answer.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("save_sum", {"sum": 579})
    assert (answer.content, answer.finish_reason) == ("", "tool_calls")


def test_a_response_format_gets_the_sum(running: Engine) -> None:
    (answer,) = ask(running, {"response_format": FORMAT})
    assert json.loads(answer.content) == {"sum": 579}
    assert answer.finish_reason == "stop"


def test_beside_tools_that_may_be_called_an_answer_is_of_the_format_or_begins_a_call(
    running: Engine,
) -> None:
    """The demo model knows no calls, so a bias makes it begin some."""
    request = {"tools": TOOLS, "response_format": FORMAT, "tool_parser": "hermes"}
    (greedy,) = ask(running, dict(request))
    assert json.loads(greedy.content) == {"sum": 579}
    kinds = []
    for bias in (0.0, 20.0):
        params = SamplingParams(
            temperature=1.0, seed=3, n=32, max_tokens=60, logit_bias={LESS_THAN: bias}
        )
        answers = ask(running, request | {"params": params})
        is_call = [one.content.lstrip().startswith("<tool_call>") for one in answers]
        kinds.append(sum(is_call))
        for answer in [one for one, called in zip(answers, is_call, strict=True) if not called]:
            assert answer.finish_reason == "stop"
            jsonschema.validate(json.loads(answer.content), SUM)
    assert kinds[0] < 8
    assert kinds[1] > 24


def test_without_a_form_of_calls_the_format_binds(running: Engine) -> None:
    params = SamplingParams(
        temperature=1.0, seed=3, n=8, max_tokens=60, logit_bias={LESS_THAN: 20.0}
    )
    request = {"tools": TOOLS, "response_format": FORMAT, "tool_parser": None, "params": params}
    for answer in ask(running, request):
        jsonschema.validate(json.loads(answer.content), SUM)


@pytest.mark.parametrize("parallel", [True, False])
def test_forced_calls_match_their_schemas(running: Engine, parallel: bool) -> None:
    params = SamplingParams(temperature=1.0, seed=1, n=16, max_tokens=300)
    request = {"tools": TOOLS, "tool_choice": "required", "params": params}
    answers = ask(running, request | {"parallel_tool_calls": parallel})
    names = []
    for answer in answers:
        is_whole = answer.finish_reason == "tool_calls"
        if is_whole:
            assert answer.content == ""
            assert parallel or len(answer.tool_calls) == 1
        for call in answer.tool_calls if is_whole else answer.tool_calls[:-1]:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
            names.append(call.name)
    assert len(names) >= 8


def test_a_form_follows_free_text_that_a_mark_ends(running: Engine) -> None:
    """The model says the sum in its own words, and then, of which it knows nothing, as an array."""
    wanted = StructuredOutputsParams(
        json={"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2},
        reasoning=ReasoningMarks(end=" = "),
    )
    params = [
        SamplingParams(temperature=float(i > 0), seed=i, max_tokens=200, structured_outputs=wanted)
        for i in range(20)
    ]
    answers = ask(running, *({"params": one} for one in params))
    assert answers[0].content.startswith("250 + 329 = ")
    ended = [answer for answer in answers if answer.finish_reason == "stop"]
    assert len(ended) >= 10
    for answer in ended:
        assert json.loads(answer.content.partition(" = ")[2]) in ([None], [None, None])


def test_offline_chats_take_the_same_options() -> None:
    with LLM() as llm:
        (output,) = llm.chat(QUESTION, GREEDY, use_tqdm=False, response_format=FORMAT)
        assert json.loads(output.outputs[0].text) == {"sum": 579}
        turn: Any = [*QUESTION, {"role": "assistant", "content": "250 + 329 ="}]
        (output,) = llm.chat(turn, GREEDY, use_tqdm=False, continue_final_message=True)
        assert output.outputs[0].text == " 579"


def test_an_engine_that_is_killed_ends_a_chat_with_failed_and_its_error() -> None:
    async def main() -> None:
        async with AsyncEngineClient.launch(max_restarts=0) as client:
            params = SamplingParams(ignore_eos=True)
            events = client.chat(QUESTION, params)
            assert isinstance(await anext(events), Started)
            assert client._supervisor is not None
            os.kill(client._supervisor.pid, signal.SIGKILL)
            async for event in events:
                if isinstance(event, Failed):
                    break
            assert isinstance(event, Failed)
            with pytest.raises(EngineDeadError) as raised:
                await anext(events)
            assert event.error is raised.value

    asyncio.run(main())
