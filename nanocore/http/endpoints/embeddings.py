"""POST /v1/embeddings: OpenAI's embeddings, with vLLM's additional fields and pooling."""

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
from nanocore.http.dialects.prompts import (
    PromptInput,
    num_kept_tokens,
    read_prompts,
    tokenize_prompts,
)
from nanocore.http.dialects.request_fields import Priority
from nanocore.http.exchange import Exchange
from nanocore.http.http_errors import bad_request


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """The request. `user` is accepted and has no effect.

    pooling: over the hidden states after the last norm: the "last" token's, or the "mean".
    normalize: to length 1. truncate_prompt_tokens: keep this many last tokens of each input; -1: as
    many as the model takes.
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
    request = await exchange.read(EmbeddingRequest)
    exchange.field_names = {"prompt_token_ids": "input"}
    model = exchange.check_model(request.model)
    client = exchange.client
    card = client.model_card
    if request.dimensions is not None and request.dimensions != card.hidden_size:
        raise bad_request(
            f"dimensions={request.dimensions}: this model's embeddings have {card.hidden_size} "
            "numbers and cannot be shortened: leave it out",
            "dimensions",
        )
    num_kept = num_kept_tokens(request.truncate_prompt_tokens, card.max_model_len)
    prompts = read_prompts(request.input, "input")
    with client.submit_tickets(len(prompts)) as tickets:
        token_ids = await tokenize_prompts(
            exchange, tickets, prompts, request.add_special_tokens is not False, "input", num_kept
        )
        outputs = await exchange.attended(_embed(client, token_ids, request, tickets))
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached_tokens = sum(output.num_cached_tokens for output in outputs)
    exchange.record.usage.add_prompt(num_tokens, num_cached_tokens)
    is_base64 = request.encoding_format == "base64"
    usage = {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }
    data = [
        {
            "index": i,
            "embedding": in_base64(one.embedding) if is_base64 else one.embedding.tolist(),
            "object": "embedding",
        }
        for i, one in enumerate(outputs)
    ]
    await exchange.reply_json({"data": data, "model": model, "usage": usage, "object": "list"})


def in_base64(numbers: array[float]) -> str:
    """Encode float32 numbers, little-endian."""
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
    """Embed all prompts; the first error cancels the others."""
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
