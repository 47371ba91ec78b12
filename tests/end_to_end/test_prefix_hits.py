"""A conversation with the demo model: what was said before is in the prefix cache."""

from __future__ import annotations

import asyncio
import random

from nanocore.client import AsyncEngineClient, RequestOutput, SamplingParams
from nanocore.client.tokenizer import ChatMessage
from nanocore.demo_model import demo_model_folder
from tests.end_to_end.forked import engine

DEMO_MODEL = demo_model_folder()
NUM_TURNS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=64)


def questions() -> list[str]:
    """As examples/demo.py asks them."""
    rng = random.Random(11)
    asked = []
    for i in range(NUM_TURNS):
        numbers = [rng.randrange(10, 1000) for _ in range(4)]
        words = rng.sample(["red", "apple", "green", "bird", "stone", "river"], 4)
        asked.append(
            (
                f"What is {numbers[0]} + {numbers[1]}?",
                f"Reverse these words: {' '.join(words)}",
                f"Sort these numbers: {' '.join(map(str, numbers))}",
                f"Which is larger, {numbers[0]} or {numbers[1]}?",
            )[i % 4]
        )
    return asked


async def converse(endpoint: str) -> tuple[int, list[RequestOutput]]:
    """The engine's block size, and each turn."""
    messages: list[ChatMessage] = []
    turns = []
    async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
        tokenizer = await client.get_tokenizer()
        for question in questions():
            messages.append({"role": "user", "content": question})
            output = await client.complete(tokenizer.encode_chat(messages), GREEDY)
            messages.append({"role": "assistant", "content": output.outputs[0].text})
            turns.append(output)
        return client.model_card.block_size, turns


def test_of_a_conversation_of_twenty_turns_nine_tenths_of_the_prompts_are_cached() -> None:
    with engine(DEMO_MODEL) as running:
        block_size, turns = asyncio.run(asyncio.wait_for(converse(running.endpoint), 60))
    assert [turn.outputs[0].finish_reason for turn in turns] == ["stop"] * NUM_TURNS
    prompts = [len(turn.prompt_token_ids) for turn in turns]
    cached = [turn.num_cached_tokens or 0 for turn in turns]
    # Of all but each answer's last token there is a KV entry; whole blocks of them are found again.
    computed = [len(turn.prompt_token_ids) + turn.outputs[0].num_tokens - 1 for turn in turns]
    assert cached == [0] + [num // block_size * block_size for num in computed[:-1]]
    assert sum(cached) >= 0.9 * sum(prompts), "and of those from the second turn on, even more"
