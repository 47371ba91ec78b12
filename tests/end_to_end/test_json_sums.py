"""The demo model's sums as JSON: a grammar that forces the form leaves it the right digits.

What is asked is held out from training (`tests/demo_model/json_sums.py`).
"""

from __future__ import annotations

import asyncio
import json

from nanocore.client import AsyncEngineClient, SamplingParams, StructuredOutputsParams
from nanocore.demo_model import demo_model_folder
from tests.demo_model.json_sums import ASKS_JSON, SUM_SCHEMA, Sum, held_out_sums
from tests.end_to_end.forked import engine

DEMO_MODEL = demo_model_folder()
COUNT = 48
LEAST = 0.93
LEAST_UNHELD = 0.85
"""Where nothing but the question asks for JSON."""


async def answers(
    endpoint: str, sums: list[Sum], params: SamplingParams, ask: str = ""
) -> list[str]:
    async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
        tokenizer = await client.get_tokenizer()
        prompts = [
            tokenizer.encode_chat([{"role": "user", "content": s.prompt + ask}]) for s in sums
        ]
        outputs = await asyncio.gather(*(client.complete(prompt, params) for prompt in prompts))
        assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
        return [output.outputs[0].text for output in outputs]


def right(sums: list[Sum], texts: list[str]) -> float:
    """The share of texts that are the JSON of their sum."""
    pairs = zip(sums, texts, strict=True)
    return sum(json.loads(text) == {"sum": s.a + s.b} for s, text in pairs) / len(sums)


def test_sums_are_right_within_the_json_that_a_schema_forces() -> None:
    sums = held_out_sums(COUNT)

    async def main(endpoint: str) -> None:
        for compact in (True, False):
            wanted = StructuredOutputsParams(json=SUM_SCHEMA, disable_any_whitespace=compact)
            params = SamplingParams(temperature=0, max_tokens=100, structured_outputs=wanted)
            texts = await answers(endpoint, sums, params)
            assert right(sums, texts) >= LEAST, texts
            if compact:
                assert not any(" " in text or "\n" in text for text in texts)
        plain = SamplingParams(temperature=0, max_tokens=100)
        asked = await answers(endpoint, sums, plain, ASKS_JSON)
        assert right(sums, asked) >= LEAST_UNHELD, asked
        unasked = await answers(endpoint, sums, plain)
        expected = [f"{s.a} + {s.b} = {s.a + s.b}" for s in sums]
        assert sum(map(str.__eq__, unasked, expected)) >= LEAST * COUNT, unasked

    with engine(DEMO_MODEL) as running:
        asyncio.run(asyncio.wait_for(main(running.endpoint), 100))
