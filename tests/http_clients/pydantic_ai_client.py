"""pydantic-ai: agents on OpenAI's APIs and Anthropic's: text, streams, tools, output types."""

from __future__ import annotations

import asyncio
from typing import Any

from expected import ANSWER, BASE_URL, MODEL, QUESTION, SUM, URL, refused
from pydantic import BaseModel, ConfigDict
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Sum(BaseModel):
    """What the model can fill in."""

    sum: int


SETTINGS: Any = {"temperature": 0, "max_tokens": 64, "parallel_tool_calls": False}
openai = OpenAIProvider(base_url=BASE_URL, api_key="none")
CHAT = OpenAIChatModel(MODEL, provider=openai)
RESPONSES = OpenAIResponsesModel(MODEL, provider=openai)
MESSAGES = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none"))


class Anything(BaseModel):
    """Any JSON object: the model does not know what a prompt says of one."""

    model_config = ConfigDict(extra="allow")


async def check(model: Any, outputs: tuple[Any, ...]) -> None:
    agent = Agent(model, model_settings=SETTINGS)

    @agent.tool_plain
    def save_sum(sum: int) -> str:
        """Keeps it."""
        return f"saved {sum}"

    answer = await agent.run(QUESTION)
    assert answer.output == ANSWER, answer
    assert answer.usage.output_tokens > 3
    again = await agent.run(QUESTION, message_history=answer.all_messages())
    assert again.output
    async with agent.run_stream(QUESTION) as stream:
        assert await stream.get_output() == ANSWER
    for output in outputs:
        typed: Any = Agent(model, output_type=output, model_settings=SETTINGS, retries=0)
        found = (await typed.run(QUESTION)).output
        assert isinstance(found, Sum | Anything), (output, found)
        async with typed.run_stream(QUESTION) as stream:
            assert type(await stream.get_output()) is type(found)


async def main() -> None:
    await check(CHAT, (ToolOutput(Sum), NativeOutput(Sum), PromptedOutput(Anything)))
    await check(RESPONSES, (ToolOutput(Sum), NativeOutput(Sum), PromptedOutput(Anything)))
    await check(MESSAGES, (ToolOutput(Sum),))
    sums = [
        (await Agent(m, output_type=NativeOutput(Sum), model_settings=SETTINGS).run(QUESTION))
        for m in (CHAT, RESPONSES)
    ]
    assert [one.output.sum for one in sums] == [SUM] * 2


asyncio.run(main())
unknown = Agent(
    OpenAIChatModel("other", provider=OpenAIProvider(base_url=BASE_URL, api_key="none"))
)
assert refused(ModelHTTPError, unknown.run_sync, user_prompt=QUESTION).status_code == 404
