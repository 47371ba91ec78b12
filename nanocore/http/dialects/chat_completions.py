"""POST /v1/chat/completions: OpenAI's chat, with vLLM's further fields."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from nanocore.client import SamplingParams
from nanocore.client.chat.chat_request import ChatOptions
from nanocore.http.answer_id import AnswerId
from nanocore.http.delivery import Delivery
from nanocore.http.dialects.chat_encoders import ChatAnswerEncoder, ChatStreamEncoder, ChatStyle
from nanocore.http.dialects.chat_options import (
    check_num_messages,
    chosen_tools,
    effort_kwargs,
    is_function,
    submit_chat,
    template_options,
)
from nanocore.http.dialects.logprobs import MAX_TOP_LOGPROBS
from nanocore.http.dialects.sampling import SamplingFields
from nanocore.http.errors import bad_request
from nanocore.http.exchange import Exchange
from nanocore.http.settings import AppSettings
from nanocore.protocol.sampling import EngineSamplingParams

_REFUSED: Final = (
    "chat_template",
    "mm_processor_kwargs",
    "logits_processors",
    "kv_transfer_params",
)


class StreamOptions(msgspec.Struct):
    """include_usage: a last chunk with the usage. continuous_usage_stats: usage in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ChatCompletionRequest(SamplingFields, kw_only=True):
    """The request. Fields from `user` on are taken and have no effect."""

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
        """What the sampler is asked for; raises as `SamplingFields.sampling_params`."""
        for name in _REFUSED:
            if getattr(self, name) is not None:
                raise bad_request(f"{name} is not served: leave it out", name)
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
        """What the conversation is asked for beside its messages."""
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
            **template_options(settings, given),
        )


async def serve(exchange: Exchange) -> None:
    """OpenAI's chat, with vLLM's further fields."""
    request = await exchange.read(ChatCompletionRequest)
    model = exchange.check_model(request.model)
    exchange.note_ignored(
        [f"tools[{tool['type']}]" for tool in request.tools or () if not is_function(tool)]
    )
    client = exchange.client
    params = request.params(client.model_card.default_sampling)
    exchange.note_params(params, request.stream)
    check_num_messages(exchange, request.messages)
    answer_id = AnswerId("chatcmpl-", request.request_id)
    answer = await submit_chat(
        exchange,
        request,
        request.messages,
        params,
        answer_id.engine_id(),
        request.options(exchange.settings),
    )
    style = ChatStyle(
        id=answer_id.text,
        created_s=int(time.time()),
        model=model,
        fingerprint=client.model_card.numerics_fingerprint,
        num_samples=params.n,
        num_top_logprobs=request.top_logprobs or 0,
        logprobs_as_token_ids=bool(request.return_tokens_as_token_ids),
        shows_reasoning=request.include_reasoning is not False,
        echo=_echoed(request.messages) if request.echo else "",
    )
    encoder: ChatStreamEncoder | ChatAnswerEncoder
    if request.stream:
        options = request.stream_options or StreamOptions()
        encoder = ChatStreamEncoder(
            style, bool(options.include_usage), bool(options.continuous_usage_stats)
        )
    else:
        encoder = ChatAnswerEncoder(style)
    await Delivery(exchange, [answer], encoder).run()


def _echoed(messages: Sequence[Mapping[str, Any]]) -> str:
    """The last message, if it is the assistant's and has a text."""
    last = messages[-1] if messages else {}
    content = last.get("content") if last.get("role") == "assistant" else None
    return content if isinstance(content, str) else ""
