"""POST /v1/completions: OpenAI's completions, with vLLM's additional fields.

Each prompt is a request to the engine. All of them make one response, in which sample i of prompt p
is the choice with index p * n + i.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from nanocore.client import AsyncEngineClient, ModelCard, SamplingParams
from nanocore.client.chat.answer_stream import AnswerStream
from nanocore.client.chat.chat_messages import is_long
from nanocore.client.chat.constraints import names_of_format, read_response_format
from nanocore.client.chat.events import ChatEvent, Finished, Logprobs, Started, Text
from nanocore.client.requests.submission import SubmitTicket
from nanocore.client.tokenizer import Tokenizer
from nanocore.http.delivery import Delivery
from nanocore.http.dialects.encoding import (
    ChunkEncoder,
    UsageSum,
    WholeEncoder,
    around,
    data,
    escaped,
)
from nanocore.http.dialects.openai_logprobs import (
    Echo,
    LogprobsShown,
    TextLogprobs,
    TextOffsets,
    prompt_logprobs,
)
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
_TEXT: Final = "\x00text"
"""Placeholder for the text of a chunk."""
NUM_SEEDS: Final = 2**53
"""Sample i has the first sample's seed plus i, modulo this."""
SampleEvent: TypeAlias = Text | Logprobs | Finished


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
        encoder = CompletionStreamEncoder(style, request.stream_options or StreamOptions())
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


class TextChoice(msgspec.Struct, kw_only=True):
    """One sample of one prompt. seed: reproduces this sample alone."""

    index: int
    text: str = ""
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    seed: int | None = None
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType = UNSET


class CompletionStyle(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a response that is not in its events, and which of these it shows.

    head: first fields of the response. num_samples: of each prompt. logprobs: None shows none.
    shows_output: False for max_tokens=0, where the engine still samples a token. shows_prompt: with
    vLLM's `prompt_logprobs`. skip_special_tokens: they are not in the text. echoes: of each prompt,
    if they are requested.
    """

    head: dict[str, Any]
    num_samples: int
    logprobs: LogprobsShown | None
    shows_output: bool
    shows_prompt: bool
    skip_special_tokens: bool
    echoes: Sequence[Echo]

    def echo(self, number: int) -> Echo | None:
        return self.echoes[number] if self.echoes else None


class PromptSamples:
    """State of one prompt's samples: seeds and text offsets. usage: of the request."""

    def __init__(
        self, style: CompletionStyle, number: int, started: Started, usage: UsageSum
    ) -> None:
        usage.add_prompt(len(started.prompt_token_ids), started.num_cached_tokens)
        self._style = style
        self._started = started
        self._usage = usage
        self._echo = style.echo(number)
        self._offsets: dict[int, TextOffsets] = {}
        self.choices = range(number * style.num_samples, (number + 1) * style.num_samples)

    def added(self, events: Sequence[ChatEvent]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the index of a choice, and the fields that consecutive events add to it.

        A completion has only text and logprobs.
        """
        of_samples = [event for event in events if isinstance(event, SampleEvent)]
        for sample, of_one in groupby(of_samples, key=lambda event: event.index):
            fields: dict[str, Any] = {}
            for event in of_one:
                if isinstance(event, Finished):
                    fields |= self._ending(event)
                    if self._style.shows_output:
                        self._usage.add_sample(event.usage)
                elif not self._style.shows_output:
                    continue
                elif isinstance(event, Text):
                    fields["text"] = fields.get("text", "") + event.delta
                else:
                    self._add_logprobs(fields.setdefault("logprobs", TextLogprobs()), event)
            if fields:
                yield self.choices[sample], fields

    def _ending(self, event: Finished) -> dict[str, Any]:
        """Return the fields of a choice at its end."""
        first = self._started.seed
        is_shown = self._style.shows_output or event.finish_reason not in ("stop", "length")
        return {
            "finish_reason": event.finish_reason if is_shown else "length",
            "stop_reason": event.stop_reason if is_shown else None,
            "seed": None if first is None else (first + event.index) % NUM_SEEDS,
        }

    def echoed_logprobs(self) -> TextLogprobs | None:
        """Return the prompt's logprobs, if they are shown."""
        shown, found = self._style.logprobs, self._started.prompt_logprobs
        if self._echo is None or shown is None or found is None:
            return None
        columns = TextLogprobs()
        # There are fewer of them than tokens if the prompt was not computed to its end.
        tokens = zip(self._started.prompt_token_ids, found, self._echo.offsets, strict=False)
        shown.add(columns, tokens)
        return columns

    def _add_logprobs(self, columns: TextLogprobs, event: Logprobs) -> None:
        style, shown = self._style, self._style.logprobs
        if shown is None:
            return
        offsets = self._offsets.get(event.index)
        if offsets is None:
            start = 0 if self._echo is None else len(self._echo.text)
            offsets = TextOffsets(
                shown.tokenizer, self._started.prompt_token_ids, style.skip_special_tokens, start
            )
            self._offsets[event.index] = offsets
        ids = [next(iter(candidates)) for candidates in event.tokens]
        shown.add(columns, zip(ids, event.tokens, map(offsets.next, ids), strict=True))


class CompletionStreamEncoder(ChunkEncoder):
    """Encoder of a stream of chunks; see `delivery.Encoder`."""

    def __init__(self, style: CompletionStyle, options: StreamOptions) -> None:
        super().__init__(style.head, options)
        self._style = style
        self._is_plain = style.shows_output and not self._always_usage
        self._texts: dict[int, tuple[bytes, bytes]] = {}  # around a text, by choice
        self._prompts: dict[int, PromptSamples] = {}
        self._num_tokens: dict[int, int] = {}

    def feed(self, number: int, events: Sequence[ChatEvent], num_output_tokens: int) -> bytes:
        # Fast path of nearly every token: a text alone, encoded between two fixed pieces.
        if len(events) == 1 and self._is_plain:
            only = events[0]
            if type(only) is Text:
                index = number * self._style.num_samples + only.index
                before, after = self._texts.get(index) or self._around(index)
                return before + escaped(only.delta) + after
        self._num_tokens[number] = num_output_tokens
        chunks: list[bytes] = []
        if events and isinstance(events[0], Started):
            chunks += self._start(number, events[0])
        chunks += [self._data(*added) for added in self._prompts[number].added(events)]
        return b"".join(chunks)

    def _start(self, number: int, event: Started) -> Iterator[bytes]:
        prompt = PromptSamples(self._style, number, event, self._usage)
        self._prompts[number] = prompt
        echo = self._style.echo(number)
        if echo is None:
            return
        logprobs = prompt.echoed_logprobs()
        if echo.text or logprobs is not None:
            for index in prompt.choices:
                yield self._data(index, {"text": echo.text, "logprobs": logprobs})

    def _data(self, index: int, fields: dict[str, Any]) -> bytes:
        chunk = self._object(index, fields)
        if self._always_usage:
            num_tokens = sum(self._num_tokens.values()) if self._style.shows_output else 0
            chunk = self._with_count(chunk, num_tokens)
        return data(chunk)

    def _object(self, index: int, fields: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "text": "", "logprobs": None, "finish_reason": None, **fields}
        return {**self._head, "choices": [choice]}

    def _around(self, index: int) -> tuple[bytes, bytes]:
        found = around(self._object(index, {"text": _TEXT}), _TEXT)
        self._texts[index] = found
        return found


class CompletionEncoder(WholeEncoder):
    """Encoder of a whole text_completion; see `delivery.Encoder`."""

    def __init__(self, style: CompletionStyle) -> None:
        self._style = style
        self._usage = UsageSum()
        self._prompts: dict[int, PromptSamples] = {}
        self._choices: dict[int, TextChoice] = {}
        self._texts: dict[int, list[str]] = {}  # pieces of each choice's text

    def feed(self, number: int, events: Sequence[ChatEvent], num_output_tokens: int) -> bytes:
        if events and isinstance(events[0], Started):
            self._start(number, events[0])
        for index, fields in self._prompts[number].added(events):
            choice = self._choices[index]
            self._texts[index].append(fields.pop("text", ""))
            logprobs = fields.pop("logprobs", None)
            if choice.logprobs is not None and logprobs is not None:
                choice.logprobs.extend(logprobs)
            for name, value in fields.items():
                setattr(choice, name, value)
        return b""

    def finish(self) -> bytes:
        for index, pieces in self._texts.items():
            self._choices[index].text = "".join(pieces)
        choices = [self._choices[index] for index in sorted(self._choices)]
        usage = self._usage.as_object()
        return msgspec.json.encode({**self._style.head, "choices": choices, "usage": usage})

    def _start(self, number: int, event: Started) -> None:
        style = self._style
        prompt = self._prompts[number] = PromptSamples(style, number, event, self._usage)
        echo = style.echo(number)
        for index in prompt.choices:
            choice = self._choices[index] = TextChoice(index=index)
            self._texts[index] = [] if echo is None else [echo.text]
            if style.shows_prompt and event.prompt_logprobs is not None:
                choice.prompt_logprobs = prompt_logprobs(event.prompt_logprobs)
            if style.logprobs is not None:
                choice.logprobs = prompt.echoed_logprobs() or TextLogprobs()
