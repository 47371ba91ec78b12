"""openai: completions, responses, embeddings and models; chats are in tests/http."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from expected import ANSWER, BASE_URL, MODEL, QUESTION, SCHEMA, SUM, ask, refused
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

GREEDY: Any = {"model": MODEL, "temperature": 0}
PROMPT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
TOOL: Any = {"type": "function", "name": "save_sum", "parameters": SCHEMA, "strict": True}
NAMED: Any = {"type": "function", "name": "save_sum"}


class Sum(BaseModel):
    """What the model can fill in."""

    sum: int


def completions(client: OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPT, max_tokens=30, logprobs=2, **GREEDY)
    (choice,) = whole.choices
    assert choice.text == ANSWER, choice
    assert choice.finish_reason == "stop"
    logprobs = choice.logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or []).startswith(ANSWER)
    assert logprobs.text_offset is not None
    assert len(logprobs.text_offset) == len(logprobs.token_logprobs or [])
    pieces = client.completions.create(
        prompt=PROMPT, max_tokens=30, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    *chunks, last = pieces
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
    assert whole.usage is not None
    assert last.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    two = client.completions.create(prompt=[PROMPT, PROMPT], max_tokens=30, n=2, **GREEDY)
    assert [one.text for one in two.choices] == [ANSWER] * 4
    echoed = client.completions.create(
        prompt=PROMPT, max_tokens=1, echo=True, logprobs=1, **GREEDY
    ).choices[0]
    assert echoed.text.endswith("1"), echoed
    assert echoed.logprobs is not None
    assert (echoed.logprobs.token_logprobs or [0])[0] is None


def responses(client: OpenAI) -> None:
    whole = client.responses.create(input=QUESTION, instructions="Be brief.", **GREEDY)
    assert whole.status == "completed"
    plain = client.responses.create(input=QUESTION, **GREEDY)
    assert plain.output_text == ANSWER
    assert plain.usage is not None
    assert plain.usage.input_tokens > 0
    assert client.responses.retrieve(plain.id).output_text == ANSWER
    following: Any = {"previous_response_id": plain.id, "input": "What is 1 + 2?"}
    assert "3" in client.responses.create(**following, **GREEDY).output_text
    client.responses.delete(plain.id)
    refused(openai.NotFoundError, client.responses.retrieve, response_id=plain.id)
    kinds = [
        event.type
        for event in client.responses.create(input=ask(), stream=True, store=False, **GREEDY)
    ]
    assert kinds[:2] == ["response.created", "response.in_progress"], kinds
    assert kinds[-1] == "response.completed"
    with client.responses.stream(input=QUESTION, **GREEDY) as events:
        text = "".join(
            event.delta for event in events if event.type == "response.output_text.delta"
        )
        assert text == events.get_final_response().output_text == ANSWER
    parsed = client.responses.parse(input=QUESTION, text_format=Sum, **GREEDY)
    assert parsed.output_parsed == Sum(sum=SUM)


def response_tools(client: OpenAI) -> None:
    one: Any = {"tools": [TOOL], "tool_choice": NAMED, "parallel_tool_calls": False}
    called = client.responses.create(input=ask(), **one, **GREEDY)
    (call,) = called.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("save_sum", {"sum": SUM})
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "saved"}
    told: Any = [*ask(), *called.output, output, *ask()]
    assert ANSWER in client.responses.create(input=told, tools=[TOOL], **GREEDY).output_text
    with client.responses.stream(input=ask(), **one, **GREEDY) as events:
        done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert [json.loads(event.arguments) for event in done] == [{"sum": SUM}]


def embeddings(client: OpenAI) -> None:
    as_base64 = client.embeddings.create(model=MODEL, input=["red apple", "green bird"]).data
    floats = client.embeddings.create(model=MODEL, input="red apple", encoding_format="float").data
    assert [one.index for one in as_base64] == [0, 1]
    assert len(floats) == 1
    assert all(
        abs(a - b) < 1e-3 for a, b in zip(as_base64[0].embedding, floats[0].embedding, strict=True)
    )


async def at_once() -> None:
    async with AsyncOpenAI(base_url=BASE_URL, api_key="none", max_retries=0) as client:

        async def one(number: int) -> str:
            text = f"What is {number} + 400?"
            async with client.responses.stream(input=text, **GREEDY) as events:
                return (await events.get_final_response()).output_text

        texts = await asyncio.gather(*map(one, range(110, 118)))
    assert texts == [f"{n} + 400 = {n + 400}" for n in range(110, 118)], texts


def main() -> None:
    with OpenAI(base_url=BASE_URL, api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        whole = client.chat.completions.create(messages=ask(), **GREEDY)
        assert whole.choices[0].message.content == ANSWER
        for part in (completions, responses, response_tools, embeddings):
            part(client)
    asyncio.run(at_once())


main()
