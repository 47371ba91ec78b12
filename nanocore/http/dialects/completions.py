"""POST /v1/completions: OpenAI's completions, with vLLM's additional fields.

Each prompt is a request to the engine. All of them make one response, in which sample i of prompt p
is the choice with index p * n + i.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from msgspec.structs import replace

from nanocore.client import AsyncEngineClient, ModelCard, SamplingParams
from nanocore.client.chat.answer_stream import AnswerStream
from nanocore.client.chat.chat_messages import is_long
from nanocore.client.chat.constraints import names_of_format, read_response_format
from nanocore.client.requests.submission import SubmitTicket
from nanocore.client.tokenizer import Tokenizer
from nanocore.http.delivery import Delivery
from nanocore.http.dialects.completion_encoders import (
    CompletionEncoder,
    CompletionStreamEncoder,
    CompletionStyle,
)
from nanocore.http.dialects.openai_logprobs import Echo, LogprobsShown
from nanocore.http.dialects.prompts import (
    OnePrompt,
    PromptInput,
    attended_aside,
    num_kept_tokens,
    read_prompts,
    tokenize_prompts,
)
from nanocore.http.dialects.request_fields import ResponseId, SamplingFields, StreamOptions
from nanocore.http.exchange import Exchange
from nanocore.http.http_errors import bad_request

DEFAULT_MAX_TOKENS: Final = 16
_REFUSED: Final = ("suffix", "prompt_embeds", "logits_processors", "kv_transfer_params")
_SUBMITTED_AT_ONCE: Final = 32
"""Prompts that are submitted before other requests have a turn."""


class CompletionRequest(SamplingFields, kw_only=True):
    """The request. Fields from `user` on are accepted and have no effect.

    max_tokens: null for as many as fit; 0, with `echo`, for none. truncate_prompt_tokens: keep this
    many last tokens of each prompt; -1: as many as leave room for the output.
    """

    prompt: PromptInput
    model: str | None = None
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    return_tokens_as_token_ids: bool | None = None
    suffix: str | None = None
    prompt_embeds: Any = None
    logits_processors: Any = None
    kv_transfer_params: Any = None
    user: Any = None

    def params(self, card: ModelCard) -> SamplingParams:
        """Return the sampling parameters; raises as `SamplingFields.sampling_params`."""
        self.refuse(*(name for name in _REFUSED if getattr(self, name)))
        if self.best_of is not None and self.best_of != (self.n or 1):
            beams = ", and use_beam_search, too" if self.use_beam_search else ""
            raise bad_request(
                f"best_of other than n is not supported: leave it out{beams}", "best_of"
            )
        if self.max_tokens == 0 and not self.echo:
            raise bad_request("max_tokens=0 needs echo: true", "max_tokens")
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request("prompt_logprobs are not streamed", "prompt_logprobs")
        max_tokens = 1 if self.max_tokens == 0 else self.max_tokens
        params = self.sampling_params(card.default_sampling, max_tokens, self.logprobs)
        if self.max_tokens is None:
            params = replace(params, max_tokens=None)
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            params = replace(params, prompt_logprobs=self.logprobs)
        constraint = read_response_format(self.response_format)
        if constraint is None:
            return params
        if params.structured_outputs is not None:
            raise bad_request(
                "both structured_outputs and response_format are given: give one of them",
                "response_format",
            )
        return replace(params, structured_outputs=constraint)


async def serve(exchange: Exchange) -> None:
    request = await exchange.read(CompletionRequest)
    exchange.field_names = {"prompt_token_ids": "prompt"}
    model = exchange.check_model(request.model)
    client = exchange.client
    params = request.params(client.model_card)
    exchange.note_params(params, request.stream)
    room = client.model_card.max_model_len
    if request.max_tokens != 0:
        room -= params.max_tokens or 1
    num_kept = num_kept_tokens(request.truncate_prompt_tokens, room)
    prompts = read_prompts(request.prompt, "prompt")
    if len(prompts) > 1:
        _check_batch(client, len(prompts) * params.n)
    response_id = ResponseId("cmpl-", request.request_id, exchange.given_request_id)
    # Reserve places before tokenizing, so that requests keep their order of arrival.
    with client.submit_tickets(len(prompts)) as tickets:
        token_ids = await tokenize_prompts(
            exchange, tickets, prompts, request.add_special_tokens is not False, "prompt", num_kept
        )
        style = CompletionStyle(
            head=response_id.head("text_completion", model, client.model_card.numerics_fingerprint),
            num_samples=params.n,
            logprobs=await _logprobs_shown(client, request),
            shows_output=request.max_tokens != 0,
            shows_prompt=request.prompt_logprobs is not None,
            skip_special_tokens=params.skip_special_tokens,
            echoes=await _echoes(exchange, tickets, request, prompts, token_ids)
            if request.echo
            else (),
        )
        streams = await _submit(client, token_ids, params, request, response_id, tickets)
        if request.response_format is not None:
            for stream in streams:
                stream.form_names = names_of_format(request.response_format)
    encoder: CompletionStreamEncoder | CompletionEncoder
    if request.stream:
        options = request.stream_options or StreamOptions()
        encoder = CompletionStreamEncoder(
            style, bool(options.include_usage), bool(options.continuous_usage_stats)
        )
    else:
        encoder = CompletionEncoder(style)
    await Delivery(exchange, streams, encoder).run()


async def _logprobs_shown(
    client: AsyncEngineClient, request: CompletionRequest
) -> LogprobsShown | None:
    if request.logprobs is None:
        return None
    as_token_ids = bool(request.return_tokens_as_token_ids)
    return LogprobsShown(await client.get_tokenizer(), request.logprobs, as_token_ids)


async def _submit(
    client: AsyncEngineClient,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    request: CompletionRequest,
    response_id: ResponseId,
    tickets: Sequence[SubmitTicket],
) -> list[AnswerStream]:
    streams: list[AnswerStream] = []
    try:
        for i, prompt in enumerate(prompts):
            if len(streams) % _SUBMITTED_AT_ONCE == _SUBMITTED_AT_ONCE - 1:
                await asyncio.sleep(0)
            streams.append(
                await client.submit(
                    prompt,
                    params,
                    response_id.engine_id(i if len(prompts) > 1 else None),
                    request.priority or 0,
                    request.cache_salt,
                    True,
                    ticket=tickets[i],
                )
            )
    except BaseException:
        # After a disconnect or a refusal, submitted prompts must not continue.
        for stream in streams:
            stream.close()
        raise
    return streams


def _check_batch(client: AsyncEngineClient, num_samples: int) -> None:
    """Refuse a batch that even an idle engine could not queue: retrying would never help."""
    most = client.limits.max_num_queued_reqs
    if most is not None and num_samples > most:
        raise bad_request(
            f"{num_samples} samples of all prompts together exceed the engine's queue of {most}: "
            "send fewer prompts at once",
            "prompt",
        )


async def _echoes(
    exchange: Exchange,
    tickets: Sequence[SubmitTicket],
    request: CompletionRequest,
    prompts: Sequence[OnePrompt],
    token_ids: Sequence[list[int]],
) -> list[Echo]:
    """Return each prompt's echo: the unchanged text, unless its beginning is truncated."""
    is_truncated = request.truncate_prompt_tokens is not None
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if request.logprobs is None and not is_truncated and len(texts) == len(prompts):
        return [Echo(text) for text in texts]

    def make(tokenizer: Tokenizer) -> list[Echo]:
        is_added = request.add_special_tokens is not False
        num_added = tokenizer.num_added_tokens if is_added else (0, 0)
        return [
            Echo.of_tokens(tokenizer, kept, prompt, num_added)
            if isinstance(prompt, str) and not is_truncated
            else Echo.of_tokens(tokenizer, kept, None)
            for prompt, kept in zip(prompts, token_ids, strict=True)
        ]

    are_long = is_long(*token_ids)
    making = exchange.client.with_tokenizer(make, are_long)
    return await (attended_aside(exchange, tickets, making) if are_long else making)
