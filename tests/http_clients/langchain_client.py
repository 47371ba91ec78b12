"""langchain-openai on both of OpenAI's APIs, and langchain-anthropic."""

from __future__ import annotations

import asyncio
from typing import Any

from expected import ANSWER, BASE_URL, JSON_QUESTION, MODEL, QUESTION, SCHEMA, SUM, URL
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class Sum(BaseModel):
    """What the model can fill in."""

    sum: int


TOOL: Any = {"type": "function", "function": {"name": "save_sum", "parameters": SCHEMA}}
COMMON: Any = {"model": MODEL, "base_url": BASE_URL, "api_key": "none", "temperature": 0}


async def at_once(*models: Any) -> None:
    for answers in await asyncio.gather(*(model.abatch([QUESTION] * 4) for model in models)):
        assert [answer.text for answer in answers] == [ANSWER] * 4


def check(model: Any, methods: tuple[str, ...], one_call: dict[str, Any]) -> None:
    """What all of them can do."""
    answer = model.invoke(QUESTION)
    assert answer.text == ANSWER, answer
    assert answer.usage_metadata["output_tokens"] > 3
    pieces = list(model.stream(QUESTION))
    assert "".join(piece.text for piece in pieces) == ANSWER
    bound = model.bind_tools([TOOL], tool_choice="save_sum", **one_call)
    called = bound.invoke(QUESTION)
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("save_sum", {"sum": SUM})
    told = [
        HumanMessage(QUESTION),
        called,
        ToolMessage("saved", tool_call_id=call["id"]),
        HumanMessage(QUESTION),
    ]
    assert model.bind_tools([TOOL]).invoke(told).text
    for method in methods:
        found = model.with_structured_output(Sum, method=method).invoke(QUESTION)
        assert found == Sum(sum=SUM), (method, found)


METHODS = ("function_calling", "json_schema")
one: Any = {"parallel_tool_calls": False}
chat = ChatOpenAI(**COMMON, stream_usage=True)
responses = ChatOpenAI(**COMMON, use_responses_api=True)
messages = ChatAnthropic(
    model=MODEL, base_url=URL, api_key="none", temperature=0, max_tokens=64, max_retries=0
)
check(chat, METHODS, one)
check(responses, METHODS, one)
check(messages, (), one)
asyncio.run(at_once(chat, responses, messages))
raw = chat.with_structured_output(Sum, method="json_mode").invoke(JSON_QUESTION)
assert raw == Sum(sum=SUM), raw
vectors = OpenAIEmbeddings(
    model=MODEL, base_url=BASE_URL, api_key="none", check_embedding_ctx_length=False
).embed_documents(["red", "green"])
assert len(vectors) == 2
assert len(vectors[0]) == len(vectors[1]) > 1
