"""OpenAI's own client, which checks each answer strictly, and a model that adds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.client.running import in_event_loop
from tests.http.in_process import app_of, openai_client

SUM: Any = {"model": "demo", "input": "What is 123 + 456?", "temperature": 0}
ANSWER = "123 + 456 = 579"


class Sum(BaseModel):
    """What the demo model can fill in."""

    sum: int


ADD: Any = {
    "type": "function",
    "name": "save_sum",
    "parameters": {**Sum.model_json_schema(), "additionalProperties": False},
    "strict": True,
}


@asynccontextmanager
async def client_of(endpoint: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """One that takes no answer that is not as OpenAI's types say."""
    async with app_of(endpoint, served_model_names=("demo",)) as (_, http):
        client = openai_client(http)
        yield client.copy(_extra_kwargs={"_strict_response_validation": True})


@in_event_loop
async def test_an_answer_is_kept_read_continued_and_deleted(demo_endpoint: str) -> None:
    async with client_of(demo_endpoint) as client:
        first = await client.responses.create(**SUM, metadata={"a": "b"})
        assert (first.output_text, first.status) == (ANSWER, "completed")
        assert await client.responses.retrieve(first.id) == first
        more = {**SUM, "input": "What is 12 + 45?", "previous_response_id": first.id}
        second = await client.responses.create(**more)
        assert second.usage is not None
        assert first.usage is not None
        assert second.output_text == "12 + 45 = 57"
        assert second.usage.input_tokens > 2 * first.usage.input_tokens
        assert second.usage.input_tokens_details.cached_tokens > 0
        items = await client.responses.input_items.list(second.id)
        assert [item.type async for item in items] == ["message"]
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError, match="only background responses"):
            await client.responses.cancel(second.id)


@in_event_loop
async def test_a_stream_tells_the_same_and_all_its_log_probabilities(demo_endpoint: str) -> None:
    async with client_of(demo_endpoint) as client:
        include: Any = ["message.output_text.logprobs"]
        stream = await client.responses.create(**SUM, stream=True, include=include, top_logprobs=2)
        events = [event async for event in stream]
        deltas = [one for one in events if one.type == "response.output_text.delta"]
        assert "".join(one.delta for one in deltas) == ANSWER
        assert all(entry.top_logprobs for one in deltas for entry in one.logprobs)
        last = events[-1]
        assert last.type == "response.completed"
        assert last.response.output_text == ANSWER
        whole = await client.responses.create(**SUM, include=include, top_logprobs=2)
        [streamed], [plain] = last.response.output, whole.output
        assert streamed.type == plain.type == "message"
        assert streamed.content == plain.content


@in_event_loop
async def test_a_class_is_parsed_whole_and_streamed(demo_endpoint: str) -> None:
    async with client_of(demo_endpoint) as client:
        whole = await client.responses.parse(**SUM, text_format=Sum)
        async with client.responses.stream(**SUM, text_format=Sum) as stream:
            streamed = await stream.get_final_response()
        assert whole.output_parsed == streamed.output_parsed == Sum(sum=579)


@in_event_loop
async def test_a_tool_is_called_and_its_result_given_back(demo_endpoint: str) -> None:
    async with client_of(demo_endpoint) as client:
        for choice in ("required", {"type": "function", "name": "save_sum"}):
            forced: Any = {"tools": [ADD], "tool_choice": choice, "parallel_tool_calls": False}
            whole = await client.responses.create(**SUM, **forced)
            async with client.responses.stream(**SUM, **forced) as stream:
                streamed = await stream.get_final_response()
            [call] = whole.output
            [same] = streamed.output
            assert call.type == same.type == "function_call"
            assert call.arguments == same.arguments
            found = Sum.model_validate_json(call.arguments).sum
            assert found == 579 or choice == "required"  # a form that it has not learnt
            result: Any = {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": "saved",
            }
            for earlier in (call.to_dict(), {"type": "item_reference", "id": call.id}):
                items: Any = [{"role": "user", "content": SUM["input"]}, earlier, result]
                last = await client.responses.create(**{**SUM, "input": items}, tools=[ADD])
                assert last.output[0].type == "message"


@in_event_loop
async def test_what_was_cut_is_incomplete(demo_endpoint: str) -> None:
    async with client_of(demo_endpoint) as client:
        response = await client.responses.create(**SUM, max_output_tokens=3)
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        whole = await client.responses.create(**SUM, max_output_tokens=10**6)
        assert whole.output_text == ANSWER
