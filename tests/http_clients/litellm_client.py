"""litellm, too large for `make test-all`: whole, streamed with usage, tools, both names."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it waits for a download
import litellm
from expected import ANSWER, BASE_URL, MODEL, SCHEMA, SUM, URL, ask, refused

TOOL: Any = {"type": "function", "function": {"name": "save_sum", "parameters": SCHEMA}}
NAMED: Any = {"type": "function", "function": {"name": "save_sum"}}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}


async def at_once(name: str, common: dict[str, Any]) -> None:
    answers = await asyncio.gather(
        *(litellm.acompletion(name, messages=ask(), **common) for _ in range(4))
    )
    assert [one.choices[0].message.content for one in answers] == [ANSWER] * 4


for provider in ("hosted_vllm", "openai"):
    name = f"{provider}/{MODEL}"
    common: Any = {"api_base": BASE_URL, "api_key": "none", "temperature": 0, "num_retries": 0}
    whole = litellm.completion(name, messages=ask(), **common)
    assert whole.choices[0].message.content == ANSWER
    chunks = list(
        litellm.completion(
            name, messages=ask(), stream=True, stream_options={"include_usage": True}, **common
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == ANSWER, text
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    called = litellm.completion(
        name, messages=ask(), tools=[TOOL], tool_choice=NAMED, parallel_tool_calls=False, **common
    )
    (call,) = called.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"sum": SUM}
    assert called.choices[0].finish_reason == "tool_calls"
    formed = litellm.completion(name, messages=ask(), response_format=FORMAT, **common)
    assert json.loads(formed.choices[0].message.content) == {"sum": SUM}
    too_long: Any = {"model": name, "messages": ask("red " * 4000), **common}
    refused(litellm.exceptions.ContextWindowExceededError, litellm.completion, **too_long)
    asyncio.run(at_once(name, common))

anthropic: Any = {"api_base": URL, "api_key": "none", "temperature": 0, "max_tokens": 64}
message = litellm.completion(f"anthropic/{MODEL}", messages=ask(), **anthropic)
assert message.choices[0].message.content == ANSWER
