"""A model answers, through the real path: SDK, ZeroMQ, engine process, scheduler, paged KV cache.

Launches `nanocore-engine` on the bundled model as its own process, streams a short chat token by
token, asks for an answer by a JSON Schema, then sends 64 requests at once over one shared context
and prints the figures.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence

from nanocore.client import AsyncEngineClient, RequestOutput, SamplingParams, collect
from nanocore.client.chat.events import Text
from nanocore.client.tokenizer import ChatMessage

NUM_REQUESTS = 64
NAMES = """
    Aaron Ada Adam Alan Albert Alice Andrea Anna Anton Arthur Barbara Ben Bertha Bob Brian Carla
    Carol Clara Claude Daisy Dan David Diana Dora Dylan Edith Elena Emil Emma Eric Eva Felix Fiona
    Frank Fred Frida George Grace Greta Hanna Harry Helen Henry Hugo Ida Ingrid Irene Ivan Jack Jane
    Joan Julia Karen Karl Kate Laura Lena Leo Lucy Maria
"""
QUESTIONS = (
    "What is 123 + 456?",
    "Reverse these words: red apple green bird",
    "Sort these numbers: 512 37 8 240",
    'Reverse the word "nanocore".',
)
SUM_SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}
GREEDY = SamplingParams(temperature=0, max_tokens=64)


async def stream_chat(client: AsyncEngineClient, questions: Sequence[str]) -> None:
    """A conversation of a few turns, each answer printed as its tokens arrive."""
    messages: list[ChatMessage] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        print(f"\n  you    {question}\n  model  ", end="", flush=True)
        answer = ""
        async for event in client.chat(messages, GREEDY):
            if isinstance(event, Text):
                print(event.delta, end="", flush=True)
                answer += event.delta
        messages.append({"role": "assistant", "content": answer})
    print()


async def answer_by_schema(client: AsyncEngineClient) -> None:
    """A question whose answer must be a value of a JSON Schema."""
    question = "What is 250 + 329?"
    response_format = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SUM_SCHEMA}}
    events = client.chat(
        [{"role": "user", "content": question}], GREEDY, response_format=response_format
    )
    (answer,) = await collect(events)
    print(f'\n  you    {question}  (by a JSON Schema: an object with an integer "sum")')
    print(f"  model  {json.dumps(json.loads(answer.content))}\n", flush=True)


async def ask_all_at_once(client: AsyncEngineClient) -> None:
    """64 questions about one list of facts: the list is computed once and then shared."""
    rng = random.Random(2026)
    names = NAMES.split()
    codes = {name: f"{rng.randrange(10000):04d}" for name in names}
    facts = " ".join(f"The code of {name} is {code}." for name, code in codes.items())
    asked = rng.choices(names, k=NUM_REQUESTS)
    print(f"{NUM_REQUESTS} requests at once, {len(codes)} facts in their shared context")

    before = await client.stats()
    start_s = time.perf_counter()
    outputs = await asyncio.gather(
        *(_ask(client, f"Remember: {facts} What is the code of {name}?") for name in asked)
    )
    elapsed_s = time.perf_counter() - start_s
    after = await client.stats()

    right = sum(codes[n] in o.outputs[0].text for n, o in zip(asked, outputs, strict=True))
    report(outputs, elapsed_s, right)
    queries = after.prefix_cache_queries - before.prefix_cache_queries
    hits = after.prefix_cache_hits - before.prefix_cache_hits
    print(f"  prefix-cache hit rate   {hits / queries:.1%} of {queries:,} prompt tokens")


async def _ask(client: AsyncEngineClient, question: str) -> RequestOutput:
    tokenizer = await client.get_tokenizer()
    prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
    return await client.complete(prompt, GREEDY)


def report(outputs: Sequence[RequestOutput], elapsed_s: float, num_right: int) -> None:
    """Print what the requests cost."""
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    ttft_ms = [1e3 * (output.metrics.time_to_first_token_s or 0.0) for output in outputs]
    print(f"  right answers           {num_right} of {len(outputs)}")
    print(f"  output tokens/s         {num_output / elapsed_s:,.0f}")
    print(f"  prompt tokens/s         {num_prompt / elapsed_s:,.0f} (shared ones count)")
    print(
        f"  time to first token     median {statistics.median(ttft_ms):.0f} ms, "
        f"max {max(ttft_ms):.0f} ms"
    )


async def main() -> None:
    """Launch, chat, load, and let everything end with the client."""
    async with AsyncEngineClient.launch(
        max_num_seqs=NUM_REQUESTS, disable_log_stats=True
    ) as client:
        card = client.model_card
        print(
            f"serving {card.architecture} of {card.vocab_size} tokens at {client.endpoint}",
            flush=True,
        )
        await stream_chat(client, QUESTIONS)
        await answer_by_schema(client)
        await ask_all_at_once(client)


if __name__ == "__main__":
    asyncio.run(main())
