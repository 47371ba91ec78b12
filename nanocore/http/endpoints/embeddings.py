"""POST /v1/embeddings: OpenAI's, with vLLM's further fields and a choice of pooling."""

from __future__ import annotations

import asyncio
import base64
import sys
from array import array
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from nanocore.client import AsyncEngineClient, EmbeddingOutput
from nanocore.client.requests.submission import SubmitTicket
from nanocore.http.attended import attended
from nanocore.http.dialects.prompts import (
    PromptInput,
    num_kept_tokens,
    read_prompts,
    tokenize_prompts,
)
from nanocore.http.dialects.sampling import Priority
from nanocore.http.errors import bad_request
from nanocore.http.exchange import Exchange


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """The request. `user` is taken and has no effect.

    pooling: of the hidden state after the last norm: the "last" token's, or the "mean" of all.
    normalize: to length 1. truncate_prompt_tokens: keep the last so many tokens of each input; -1:
    as many as the model takes.
    """

    input: PromptInput
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Literal["last", "mean"] | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: Priority | None = None
    cache_salt: str | None = None
    user: Any = None


async def serve(exchange: Exchange) -> None:
    """Answer one."""
    request = await exchange.read(EmbeddingRequest)
    model = exchange.check_model(request.model)
    client = exchange.client
    card = client.model_card
    if request.dimensions is not None and request.dimensions != card.hidden_size:
        raise bad_request(
            f"dimensions={request.dimensions}: this model's embeddings have {card.hidden_size} "
            "numbers, and were not made to be shortened; leave it out",
            "dimensions",
        )
    num_kept = num_kept_tokens(request.truncate_prompt_tokens, card.max_model_len)
    prompts = read_prompts(request.input, "input")
    with client.submit_tickets(len(prompts)) as tickets:
        token_ids = await tokenize_prompts(
            exchange, tickets, prompts, request.add_special_tokens is not False, "input", num_kept
        )
        outputs = await attended(exchange, _embed(client, token_ids, request, tickets))
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached_tokens = sum(output.num_cached_tokens for output in outputs)
    if exchange.record is not None:
        exchange.record.usage.add_prompt(num_tokens, num_cached_tokens)
    is_base64 = request.encoding_format == "base64"
    await exchange.reply_json(
        {
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": in_base64(output.embedding) if is_base64 else [*output.embedding],
                }
                for index, output in enumerate(outputs)
            ],
            "model": model,
            "usage": {
                "prompt_tokens": num_tokens,
                "total_tokens": num_tokens,
                "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
            },
        }
    )


def in_base64(numbers: array[float]) -> str:
    """float32, the lower byte first."""
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


async def _embed(
    client: AsyncEngineClient,
    prompts: Sequence[list[int]],
    request: EmbeddingRequest,
    tickets: Sequence[SubmitTicket],
) -> list[EmbeddingOutput]:
    """Of all of them; the first that fails ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    client.embed(
                        prompt,
                        request.pooling or "last",
                        request.normalize is not False,
                        None,
                        request.priority or 0,
                        request.cache_salt,
                        ticket,
                    )
                )
                for prompt, ticket in zip(prompts, tickets, strict=True)
            ]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
