"""POST /v1/completions: OpenAI's, with vLLM's further fields.

Several prompts are as many requests to the engine, and one answer: sample i of prompt p is the
choice of index p * n + i.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final

from msgspec.structs import replace

from nanocore.client import AsyncEngineClient, ModelCard, SamplingParams
from nanocore.client.chat.answer_stream import AnswerStream
from nanocore.client.chat.chat_messages import is_long
from nanocore.client.chat.constraints import names_of_format, read_response_format
from nanocore.client.requests.submission import SubmitTicket
from nanocore.client.tokenizer import Tokenizer
from nanocore.http.answer_id import AnswerId
from nanocore.http.attended import attended_aside
from nanocore.http.delivery import Delivery
from nanocore.http.dialects.chat_completions import StreamOptions
from nanocore.http.dialects.completion_encoders import (
    CompletionAnswerEncoder,
    CompletionStreamEncoder,
    CompletionStyle,
)
from nanocore.http.dialects.prompts import (
    OnePrompt,
    PromptInput,
    num_kept_tokens,
    read_prompts,
    tokenize_prompts,
)
from nanocore.http.dialects.sampling import SamplingFields
from nanocore.http.dialects.text_logprobs import Echo, LogprobsShown
from nanocore.http.errors import bad_request
from nanocore.http.exchange import Exchange

DEFAULT_MAX_TOKENS: Final = 16
_REFUSED: Final = ("suffix", "prompt_embeds", "logits_processors", "kv_transfer_params")
_SUBMITTED_AT_ONCE: Final = 32
"""Of a batch, before others have their turn."""


class CompletionRequest(SamplingFields, kw_only=True):
    """The request. Fields from `user` on are taken and have no effect.

    max_tokens: null for as many as fit; 0, with `echo`, for none. truncate_prompt_tokens: keep the
    last so many tokens of each prompt; -1: as many as leave room for the output.
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
        """What the sampler is asked for; raises as `SamplingFields.sampling_params`."""
        for name in _REFUSED:
            if getattr(self, name):
                raise bad_request(f"{name} is not served: leave it out", name)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise bad_request("best_of other than n is not served: leave it out", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise bad_request("max_tokens=0 needs echo: true, or nothing is asked", "max_tokens")
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request("prompt_logprobs are not streamed", "prompt_logprobs")
        max_tokens = 1 if self.max_tokens == 0 else self.max_tokens
        params = self.sampling_params(card.default_sampling, max_tokens, self.logprobs)
        if self.max_tokens is None:
            params = replace(params, max_tokens=None)
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            params = replace(params, prompt_logprobs=self.logprobs)
        form = read_response_format(self.response_format)
        if form is None:
            return params
        if params.structured_outputs is not None:
            raise bad_request(
                "structured_outputs beside a response_format: an answer has one form; give one",
                "response_format",
            )
        return replace(params, structured_outputs=form)


async def serve(exchange: Exchange) -> None:
    """Answer one."""
    request = await exchange.read(CompletionRequest)
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
    answer_id = AnswerId("cmpl-", request.request_id)
    with client.submit_tickets(len(prompts)) as tickets:
        token_ids = await tokenize_prompts(
            exchange, tickets, prompts, request.add_special_tokens is not False, "prompt", num_kept
        )
        style = CompletionStyle(
            id=answer_id.text,
            created_s=int(time.time()),
            model=model,
            fingerprint=client.model_card.numerics_fingerprint,
            num_samples=params.n,
            logprobs=await _shown(client, request),
            shows_output=request.max_tokens != 0,
            shows_prompt=request.prompt_logprobs is not None,
            skip_special_tokens=params.skip_special_tokens,
            echoes=await _echoes(exchange, tickets, request, prompts, token_ids)
            if request.echo
            else (),
        )
        answers = await _submit(client, token_ids, params, request, answer_id, tickets)
        if request.response_format is not None:
            for answer in answers:
                answer.form_names = names_of_format(request.response_format)
    encoder: CompletionStreamEncoder | CompletionAnswerEncoder
    if request.stream:
        options = request.stream_options or StreamOptions()
        encoder = CompletionStreamEncoder(
            style, bool(options.include_usage), bool(options.continuous_usage_stats)
        )
    else:
        encoder = CompletionAnswerEncoder(style)
    await Delivery(exchange, answers, encoder).run()


async def _shown(client: AsyncEngineClient, request: CompletionRequest) -> LogprobsShown | None:
    if request.logprobs is None:
        return None
    as_token_ids = bool(request.return_tokens_as_token_ids)
    return LogprobsShown(await client.get_tokenizer(), request.logprobs, as_token_ids)


async def _submit(
    client: AsyncEngineClient,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    request: CompletionRequest,
    answer_id: AnswerId,
    tickets: Sequence[SubmitTicket],
) -> list[AnswerStream]:
    """All of them, or none."""
    answers: list[AnswerStream] = []
    try:
        for i, prompt in enumerate(prompts):
            if len(answers) % _SUBMITTED_AT_ONCE == _SUBMITTED_AT_ONCE - 1:
                await asyncio.sleep(0)
            answers.append(
                await client.submit(
                    prompt,
                    params,
                    answer_id.engine_id(i if len(prompts) > 1 else None),
                    request.priority or 0,
                    request.cache_salt,
                    True,
                    ticket=tickets[i],
                )
            )
    except BaseException:
        for answer in answers:
            answer.close()
        raise
    return answers


def _check_batch(client: AsyncEngineClient, num_samples: int) -> None:
    """Refuse what would be too much for an engine that has nothing else to do."""
    most = client.limits.max_num_queued_reqs
    if most is not None and num_samples > most:
        raise bad_request(
            f"{num_samples} samples, of all prompts together, are more than the {most} that wait "
            "for the engine at most: send fewer prompts at once",
            "prompt",
        )


async def _echoes(
    exchange: Exchange,
    tickets: Sequence[SubmitTicket],
    request: CompletionRequest,
    prompts: Sequence[OnePrompt],
    token_ids: Sequence[list[int]],
) -> list[Echo]:
    """Of each prompt; a text is echoed as it came, unless its beginning is cut off."""
    if request.logprobs is None and request.truncate_prompt_tokens is None:
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if len(texts) == len(prompts):
            return [Echo(text) for text in texts]

    def make(tokenizer: Tokenizer) -> list[Echo]:
        is_added = request.add_special_tokens is not False
        num_added = tokenizer.num_added_tokens if is_added else (0, 0)
        echoes = []
        for prompt, kept in zip(prompts, token_ids, strict=True):
            if not isinstance(prompt, str):
                echoes.append(Echo.of(tokenizer, kept, None))
            elif request.truncate_prompt_tokens is None:
                echoes.append(Echo.of(tokenizer, kept, prompt, num_added))
            else:
                echoes.append(Echo.of(tokenizer, kept, None))
        return echoes

    are_long = is_long(*token_ids)
    making = exchange.client.with_tokenizer(make, are_long)
    return await (attended_aside(exchange, tickets, making) if are_long else making)
