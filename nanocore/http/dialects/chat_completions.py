"""POST /v1/chat/completions: OpenAI's chat completions, with vLLM's additional fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from nanocore.client import SamplingParams
from nanocore.client.chat.chat_request import ChatOptions
from nanocore.client.chat.events import (
    AnswerCollector,
    ChatAnswer,
    ChatEvent,
    Finished,
    Logprobs,
    Reasoning,
    Started,
    Text,
    ToolArguments,
    ToolBegin,
)
from nanocore.http.delivery import Delivery
from nanocore.http.dialects.chat_options import (
    check_num_messages,
    chosen_tools,
    effort_kwargs,
    is_function,
    submit_chat,
    template_options,
)
from nanocore.http.dialects.encoding import (
    ChunkEncoder,
    UsageSum,
    WholeEncoder,
    around,
    data,
    escaped,
)
from nanocore.http.dialects.openai_logprobs import MAX_TOP_LOGPROBS, chat_logprobs, prompt_logprobs
from nanocore.http.dialects.request_fields import ResponseId, SamplingFields, StreamOptions
from nanocore.http.exchange import Exchange
from nanocore.http.http_errors import bad_request
from nanocore.http.server_settings import AppSettings
from nanocore.protocol.sampling import EngineSamplingParams

_TEXT: Final = "\x00text"
"""Placeholder for the text of a chunk."""


class ChatCompletionRequest(SamplingFields, kw_only=True):
    """The request. Fields from `user` on are accepted and have no effect."""

    messages: list[dict[str, Any]]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    chat_template: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    logits_processors: Any = None
    kv_transfer_params: Any = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    def params(self, recommended: EngineSamplingParams) -> SamplingParams:
        """Return the sampling parameters; raises as `SamplingFields.sampling_params`."""
        self.refuse("mm_processor_kwargs", "logits_processors", "kv_transfer_params")
        num_top = self.top_logprobs or 0
        if num_top and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        if not 0 <= num_top <= MAX_TOP_LOGPROBS:
            raise bad_request(f"top_logprobs is 0 to {MAX_TOP_LOGPROBS}", "top_logprobs")
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request("prompt_logprobs are not streamed", "prompt_logprobs")
        max_tokens = self.max_completion_tokens
        return self.sampling_params(
            recommended,
            self.max_tokens if max_tokens is None else max_tokens,
            num_top if self.logprobs else None,
        )

    def options(self, settings: AppSettings) -> ChatOptions:
        given = effort_kwargs(self.reasoning_effort)
        if self.documents is not None:
            given["documents"] = self.documents
        given |= self.chat_template_kwargs or {}
        tools, tool_choice = chosen_tools(self.tools, self.tool_choice)
        return ChatOptions(
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self.response_format,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
            **template_options(settings, given, self.chat_template),
        )


class ChatStyle(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a response that is not in its events, and which of these it shows.

    head: first fields of the response. echo: text that precedes each sample's.
    """

    head: dict[str, Any]
    num_samples: int
    num_top_logprobs: int
    logprobs_as_token_ids: bool
    shows_reasoning: bool
    echo: str

    def logprobs(self, event: Logprobs) -> dict[str, Any]:
        tokens = chat_logprobs(event.tokens, self.num_top_logprobs, self.logprobs_as_token_ids)
        return {"content": tokens}


class ChatStreamEncoder(ChunkEncoder):
    """Encoder of chat.completion.chunk objects; see `delivery.Encoder`.

    Text after a tool call starts on a new line, as in `ChatAnswer`.
    """

    def __init__(self, style: ChatStyle, options: StreamOptions) -> None:
        super().__init__({**style.head, "object": "chat.completion.chunk"}, options)
        self._style = style
        self._num_tokens = 0
        # By sample: the bytes around the text of a chunk that has nothing else.
        texts = [self._object(index, {"content": _TEXT}) for index in range(style.num_samples)]
        self._texts = [around(chunk, _TEXT) for chunk in texts]
        self._with_text: set[int] = set()
        self._split: set[int] = set()  # samples whose next text follows a call

    def feed(self, number: int, events: Sequence[ChatEvent], num_output_tokens: int) -> bytes:
        self._num_tokens = num_output_tokens
        # Fast path of nearly every token: a text alone, encoded between two fixed pieces.
        if len(events) == 1 and not self._always_usage:
            only = events[0]
            if type(only) is Text and only.index not in self._split:
                self._with_text.add(only.index)
                before, after = self._texts[only.index]
                return before + escaped(only.delta) + after
        chunks: list[bytes] = []
        for place, event in enumerate(events):
            if not isinstance(event, Logprobs):
                following = events[place + 1] if place + 1 < len(events) else None
                chunks += self._chunks(event, self._carried(event, following))
            elif place == 0 or self._carried(events[place - 1], event) is None:
                chunks.append(self._chunk(event.index, {}, event))
        return b"".join(chunks)

    def _carried(self, event: ChatEvent, following: ChatEvent | None) -> Logprobs | None:
        """Return the logprobs that share a chunk with an event: those of its tokens."""
        if not isinstance(following, Logprobs):
            return None
        if isinstance(event, Reasoning) and not self._style.shows_reasoning:
            return None
        if isinstance(event, (Text, Reasoning, ToolBegin, ToolArguments)):
            return following if event.index == following.index else None
        return None

    def _chunks(self, event: ChatEvent, logprobs: Logprobs | None) -> list[bytes]:
        match event:
            case Started():
                return self._first_chunks(event)
            case Text():
                line_break = "\n" if event.index in self._split else ""
                self._split.discard(event.index)
                self._with_text.add(event.index)
                return [self._chunk(event.index, {"content": line_break + event.delta}, logprobs)]
            case Reasoning():
                if not self._style.shows_reasoning:
                    return []
                delta = {"reasoning": event.delta, "reasoning_content": event.delta}
                return [self._chunk(event.index, delta, logprobs)]
            case ToolBegin():
                self._split |= self._with_text & {event.index}
                call = {
                    "index": event.tool_index,
                    "id": event.id,
                    "type": "function",
                    "function": {"name": event.name, "arguments": ""},
                }
                return [self._chunk(event.index, {"tool_calls": [call]}, logprobs)]
            case ToolArguments():
                call = {"index": event.tool_index, "function": {"arguments": event.delta}}
                return [self._chunk(event.index, {"tool_calls": [call]}, logprobs)]
            case Finished():
                self._usage.add_sample(event.usage)
                last = self._object(event.index, {})
                last["choices"][0]["finish_reason"] = event.finish_reason
                last["choices"][0]["stop_reason"] = event.stop_reason
                return [data(last)]
            case _:
                raise AssertionError(f"{event} is not a chat's")

    def _first_chunks(self, event: Started) -> list[bytes]:
        self._usage.add_prompt(len(event.prompt_token_ids), event.num_cached_tokens)
        chunks = []
        for index in range(self._style.num_samples):
            first = self._object(index, {"role": "assistant", "content": self._style.echo})
            if event.seed is not None:
                first["seed"] = event.seed
            chunks.append(data(first))
        return chunks

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Logprobs | None) -> bytes:
        chunk = self._object(index, delta)
        if logprobs is not None:
            chunk["choices"][0]["logprobs"] = self._style.logprobs(logprobs)
        return data(chunk)

    def _object(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = {**self._head, "choices": [choice]}
        return self._with_count(chunk, self._num_tokens) if self._always_usage else chunk


class ChatCompletionEncoder(WholeEncoder):
    """Encoder of a whole chat.completion; see `delivery.Encoder`."""

    def __init__(self, style: ChatStyle) -> None:
        self._style = style
        self._collector = AnswerCollector()
        self._usage = UsageSum()
        self._started: Started | None = None

    def feed(self, number: int, events: Sequence[ChatEvent], num_output_tokens: int) -> bytes:
        for event in events:
            if isinstance(event, Started):
                self._started = event
                self._usage.add_prompt(len(event.prompt_token_ids), event.num_cached_tokens)
            elif isinstance(event, Finished):
                self._usage.add_sample(event.usage)
            self._collector.add(event)
        return b""

    def finish(self) -> bytes:
        whole = {
            **self._style.head,
            "choices": [self._choice(*one) for one in enumerate(self._collector.answers())],
            "usage": self._usage.as_object(),
        }
        if self._started is not None:
            whole["seed"] = self._started.seed
            if self._started.prompt_logprobs is not None:
                whole["prompt_logprobs"] = prompt_logprobs(self._started.prompt_logprobs)
        return msgspec.json.encode(whole)

    def _choice(self, index: int, sample: ChatAnswer) -> dict[str, Any]:
        style = self._style
        content = style.echo + sample.content
        message = {
            "role": "assistant",
            # OpenAI's content is null, not empty, where there are only calls.
            "content": content or None if sample.tool_calls else content,
            "refusal": None,
            "annotations": [],
            "tool_calls": sample.to_message().get("tool_calls", []),
        }
        if sample.reasoning and style.shows_reasoning:  # clients use both names
            message["reasoning"] = message["reasoning_content"] = sample.reasoning
        logprobs = style.logprobs(Logprobs(sample.logprobs)) if sample.logprobs else None
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }


async def serve(exchange: Exchange) -> None:
    request = await exchange.read(ChatCompletionRequest)
    model = exchange.check_model(request.model)
    exchange.note_ignored(
        [f"tools[{tool['type']}]" for tool in request.tools or () if not is_function(tool)]
    )
    client = exchange.client
    params = request.params(client.model_card.default_sampling)
    exchange.note_params(params, request.stream)
    check_num_messages(exchange, request.messages)
    response_id = ResponseId("chatcmpl-", request.request_id, exchange.given_request_id)
    stream = await submit_chat(
        exchange,
        request,
        request.messages,
        params,
        response_id.engine_id(),
        request.options(exchange.settings),
    )
    style = ChatStyle(
        head=response_id.head("chat.completion", model, client.model_card.numerics_fingerprint),
        num_samples=params.n,
        num_top_logprobs=request.top_logprobs or 0,
        logprobs_as_token_ids=bool(request.return_tokens_as_token_ids),
        shows_reasoning=request.include_reasoning is not False,
        echo=_echoed(request.messages) if request.echo else "",
    )
    encoder: ChatStreamEncoder | ChatCompletionEncoder
    if request.stream:
        encoder = ChatStreamEncoder(style, request.stream_options or StreamOptions())
    else:
        encoder = ChatCompletionEncoder(style)
    await Delivery(exchange, [stream], encoder).run()


def _echoed(messages: Sequence[Mapping[str, Any]]) -> str:
    last = messages[-1] if messages else {}
    content = last.get("content") if last.get("role") == "assistant" else None
    return content if isinstance(content, str) else ""
