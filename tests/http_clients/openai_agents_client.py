"""openai-agents: a run, a streamed run, a tool that must be called, an output type; both APIs."""

from __future__ import annotations

import asyncio
import os
from typing import Any

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from expected import ANSWER, BASE_URL, MODEL, QUESTION, SUM
from openai import AsyncOpenAI
from pydantic import BaseModel

saved: list[int] = []


class Sum(BaseModel):
    """What the model can fill in."""

    sum: int


@function_tool
def save_sum(sum: int) -> str:
    """Keeps it."""
    saved.append(sum)
    return "saved"


async def check(model: Any) -> None:
    settings = ModelSettings(temperature=0, max_tokens=64, include_usage=True)
    plain = Agent(name="plain", model=model, model_settings=settings)
    answer = await Runner.run(plain, QUESTION)
    assert answer.final_output == ANSWER, answer
    assert answer.context_wrapper.usage.output_tokens > 3
    streamed = Runner.run_streamed(plain, QUESTION)
    kinds = [event.type async for event in streamed.stream_events()]
    assert "raw_response_event" in kinds
    assert streamed.final_output == ANSWER
    forced = ModelSettings(
        temperature=0, max_tokens=64, tool_choice="save_sum", parallel_tool_calls=False
    )
    caller = Agent(
        name="caller",
        model=model,
        model_settings=forced,
        tools=[save_sum],
        tool_use_behavior="stop_on_first_tool",
    )
    saved.clear()
    assert (await Runner.run(caller, QUESTION)).final_output == "saved"
    assert saved == [SUM], saved
    loop = caller.clone(tool_use_behavior="run_llm_again", reset_tool_choice=True)
    assert (await Runner.run(loop, QUESTION)).final_output
    typed = Agent(name="typed", model=model, model_settings=settings, output_type=Sum)
    assert (await Runner.run(typed, QUESTION)).final_output == Sum(sum=SUM)


async def main() -> None:
    async with AsyncOpenAI(base_url=BASE_URL, api_key="none") as client:
        await check(OpenAIChatCompletionsModel(MODEL, client))
        await check(OpenAIResponsesModel(MODEL, client))


asyncio.run(main())
