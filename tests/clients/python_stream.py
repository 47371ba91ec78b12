"""`stream` with the Python SDK: ENDPOINT PROMPT MAX_TOKENS, as PROTOCOL.md's section 15 asks."""

from __future__ import annotations

import asyncio
import sys

from nanocore.client import AsyncEngineClient, SamplingParams
from nanocore.protocol.errors import NanocoreError


async def stream(endpoint: str, prompt: str, max_tokens: str) -> None:
    """Print the token ids of one greedy request as they arrive, and how it ended."""
    params = SamplingParams(temperature=0, max_tokens=int(max_tokens), detokenize=False)
    token_ids = [int(token_id) for token_id in prompt.split(",")]
    # The rules want a client that ends with its engine.
    async with AsyncEngineClient.connect(endpoint, resume=False) as client:
        num_printed = 0
        async for output in client.generate(token_ids, params):
            completion = output.outputs[0]
            for token_id in completion.token_ids[num_printed:]:
                print(token_id, flush=True)
            num_printed = len(completion.token_ids)
    print(f"finish_reason: {completion.finish_reason}", flush=True)


if __name__ == "__main__":
    try:
        asyncio.run(stream(*sys.argv[1:]))
    except NanocoreError as error:
        sys.exit(f"{type(error).__name__}: {error}")
