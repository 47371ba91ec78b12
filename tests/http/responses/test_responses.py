"""/v1/responses, with our requests and with OpenAI's client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.http.asgi import app_of, openai_client
from tests.http.responses.asked import asked_app

ADD: Any = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


async def test_a_text_is_answered_whole_or_in_events_alike(short_path: Path) -> None:
    async with asked_app(short_path) as asked:
        body = {"input": "hi", "instructions": "Be brief.", "metadata": {"a": "b"}}
        whole = (await asked.respond(body, "he", "llo")).json()
        reply = await asked.respond({**body, "stream": True}, "he", "llo")
        assert asked.prompts == ["system: Be brief.\nuser: hi\nassistant: "] * 2
        assert reply.headers["content-type"].startswith("text/event-stream")
        events = reply.events()
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert list(dict.fromkeys(event["type"] for event in events))[4:] == [
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        streamed = events[-1]["response"]
        assert streamed["output"][0].pop("id") == streamed["id"].replace("resp", "msg") + "_0"
        whole["output"][0].pop("id")
        for response in (whole, streamed):
            assert response.pop("completed_at") >= response["created_at"]
            del response["id"], response["created_at"]
        assert whole == streamed
        assert whole["output"][0]["content"][0]["text"] == "hello"
        assert whole["metadata"] == {"a": "b"}
        assert whole["usage"]["output_tokens"] == 6
        assert whole["usage"]["total_tokens"] == 6 + whole["usage"]["input_tokens"]


async def test_a_conversation_goes_on_where_the_last_response_ended(short_path: Path) -> None:
    async with asked_app(short_path) as asked:
        tools = {"tools": [ADD], "reasoning": {"effort": "low"}}
        first = await asked.respond(
            {"input": "1 + 1?", "instructions": "gone", **tools}, "hm</think>", CALL
        )
        reasoning, call = first.json()["output"]
        assert (reasoning["content"][0]["text"], call["arguments"]) == ("hm", '{"a": 1}')
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
        previous = first.json()["id"]
        second = await asked.respond(
            {"input": [result], "previous_response_id": previous, "stream": True}, "It is 2."
        )
        talk = 'user: 1 + 1?\nassistant: (hm)<add{"a": 1}>\ntool: 2\nassistant: '
        assert asked.prompts[1] == talk
        third = {
            "input": "sure?",
            "previous_response_id": second.events()[-1]["response"]["id"],
        }
        await asked.respond(third, "yes")
        assert asked.prompts[2] == f"{talk}It is 2.\nuser: sure?\nassistant: "


async def test_references_stand_for_stored_items(short_path: Path) -> None:
    async with asked_app(short_path) as asked:
        first = (await asked.respond({"input": "hi"}, "hello")).json()
        output_id = first["output"][0]["id"]
        references = [
            {"type": "item_reference", "id": output_id},
            {"role": "user", "content": "so?"},
            {"id": output_id},
        ]
        await asked.respond({"input": references}, "so")
        assert asked.prompts[1] == "assistant: hello\nuser: so?\nassistant: hello\nassistant: "
        lost = await asked.request(
            "POST", "/v1/responses", {"input": [{"type": "item_reference", "id": "msg_a_0"}]}
        )
        assert (lost.status, lost.json()["error"]["code"]) == (404, "item_not_found")


async def test_a_stored_response_is_read_and_deleted(short_path: Path) -> None:
    async with asked_app(short_path) as asked:
        whole = await asked.respond({"input": "hi"}, "hello")
        path = f"/v1/responses/{whole.json()['id']}"
        assert (await asked.request("GET", path)).body == whole.body

        assert (await asked.request("GET", f"{path}?stream=true")).status == 400
        deleted = (await asked.request("DELETE", path)).json()
        assert deleted == {"id": whole.json()["id"], "object": "response", "deleted": True}
        for method in ("GET", "DELETE"):
            assert (await asked.request(method, path)).status == 404
        lost = {"input": "x", "previous_response_id": whole.json()["id"]}
        refused = await asked.request("POST", "/v1/responses", lost)
        assert refused.json()["error"]["code"] == "previous_response_not_found"
        assert refused.status == 400


@pytest.mark.parametrize("settings", [{}, {"stored_responses_bytes": 0}])
async def test_what_is_not_to_be_stored_is_not(short_path: Path, settings: dict[str, Any]) -> None:
    async with asked_app(short_path, **settings) as asked:
        store = {"store": False} if not settings else {}
        response = (await asked.respond({"input": "hi", **store}, "hello")).json()
        assert response["store"] is False
        assert (await asked.request("GET", f"/v1/responses/{response['id']}")).status == 404
        body = {"input": "x", "previous_response_id": response["id"]}
        refused = await asked.request("POST", "/v1/responses", body)
        assert (refused.status, refused.json()["error"]["param"]) == (
            400,
            "previous_response_id",
        )


async def test_tools_of_vendors_are_named_and_left_out(short_path: Path) -> None:
    async with asked_app(short_path) as asked:
        tools = [{"type": "web_search"}, ADD, {"type": "namespace", "name": "n"}]
        body = {"input": "hi", "tools": tools, "client_metadata": {}, "include": ["x"]}
        reply = await asked.respond(body, CALL)
        ignored = "client_metadata, tools[type=namespace], tools[type=web_search]"
        assert reply.headers["nanocore-ignored"] == ignored
        assert "web_search" not in asked.prompts[0]
        assert [tool["name"] for tool in reply.json()["tools"]] == ["add"]
        assert reply.json()["output"][0]["name"] == "add"


async def test_an_answer_is_held_to_its_form_beside_tools_too(short_path: Path) -> None:
    async with asked_app(short_path) as asked:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        form = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
        body = {"input": "hi", "text": form}
        alone = await asked.respond(body, '{"a": 1}')
        beside = await asked.respond({**body, "tools": [ADD]}, '{"a": 1}')
        forced = await asked.respond(
            {**body, "tools": [ADD], "tool_choice": {"type": "function", "name": "add"}}, "{}"
        )
        held_to = [submit.sampling.structured_outputs for submit in asked.submits]
        assert all(wanted is not None for wanted in held_to)
        for reply in (alone, beside):
            assert "nanocore-ignored" not in reply.headers
            assert reply.json()["text"] == {**form, "verbosity": "medium"}
        assert forced.json()["output"][0]["type"] == "function_call"


async def test_log_probabilities_are_asked_for_in_either_way(short_path: Path) -> None:
    async with asked_app(short_path) as asked:
        include = {"include": ["message.output_text.logprobs"]}
        for fields in ({}, {"top_logprobs": 2}, include, {"top_logprobs": 0}):
            await asked.respond({"input": "hi", **fields}, reason="length")
        wanted = [submit.sampling.logprobs for submit in asked.submits]
        assert wanted == [None, 2, 0, None]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"n": 2}, "n"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"temperature": "hot"}, "temperature"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, None),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, None),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"input": []}, None),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(
    short_path: Path, fields: dict[str, Any], param: str | None
) -> None:
    async with asked_app(short_path) as asked:
        reply = await asked.request("POST", "/v1/responses", {"input": "hi", **fields})
        assert (reply.status, reply.json()["error"]["param"]) == (400, param)


async def test_what_is_wrong_is_called_by_its_own_name(short_path: Path) -> None:
    async with asked_app(short_path) as asked:
        for body, place in (
            ({"input": "hi", "text": {"format": {"type": "odd"}}}, "text.format"),
            ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, ".text is a"),
        ):
            reply = await asked.request("POST", "/v1/responses", body)
            assert reply.status == 400
            assert place in reply.json()["error"]["message"]
            assert "response_format" not in reply.json()["error"]["message"]


SUM: Any = {"model": "demo", "input": "What is 123 + 456?", "temperature": 0}
ANSWER = "123 + 456 = 579"


class Sum(BaseModel):
    """What the demo model can fill in."""

    sum: int


ADDING: Any = {
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
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.APIStatusError, match="does not support POST"):
            await client.responses.cancel(second.id)


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


async def test_a_class_is_parsed_whole_and_streamed(demo_endpoint: str) -> None:
    async with client_of(demo_endpoint) as client:
        whole = await client.responses.parse(**SUM, text_format=Sum)
        async with client.responses.stream(**SUM, text_format=Sum) as stream:
            streamed = await stream.get_final_response()
        assert whole.output_parsed == streamed.output_parsed == Sum(sum=579)


async def test_a_tool_is_called_and_its_result_given_back(demo_endpoint: str) -> None:
    async with client_of(demo_endpoint) as client:
        for choice in ("required", {"type": "function", "name": "save_sum"}):
            forced: Any = {
                "tools": [ADDING],
                "tool_choice": choice,
                "parallel_tool_calls": False,
            }
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
                last = await client.responses.create(**{**SUM, "input": items}, tools=[ADDING])
                assert last.output[0].type == "message"


async def test_what_was_cut_is_incomplete(demo_endpoint: str) -> None:
    async with client_of(demo_endpoint) as client:
        response = await client.responses.create(**SUM, max_output_tokens=3)
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        whole = await client.responses.create(**SUM, max_output_tokens=10**6)
        assert whole.output_text == ANSWER
