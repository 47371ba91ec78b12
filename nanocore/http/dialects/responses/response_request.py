"""Endpoints of /v1/responses: OpenAI's responses, with vLLM's additional sampling fields.

Stored ones can be read and deleted.
"""

from __future__ import annotations

import time
import uuid
from typing import Any, Final, Literal

import msgspec

from nanocore.client import SamplingParams
from nanocore.client.chat.chat_request import ChatOptions
from nanocore.http.delivery import Delivery
from nanocore.http.dialects.chat_options import (
    check_num_messages,
    effort_kwargs,
    submit_chat,
    template_options,
)
from nanocore.http.dialects.openai_logprobs import MAX_TOP_LOGPROBS
from nanocore.http.dialects.request_fields import SamplingFields
from nanocore.http.dialects.responses.response_encoders import (
    Keep,
    ResponseEncoder,
    ResponseStreamEncoder,
    ResponseStyle,
)
from nanocore.http.dialects.responses.response_items import (
    Item,
    ItemReader,
    ResponseTools,
    messages_of,
    read_response_tools,
)
from nanocore.http.exchange import Exchange
from nanocore.http.http_errors import HttpError, bad_request
from nanocore.http.server_settings import AppSettings
from nanocore.http.state import ResponseStore, StoredResponse
from nanocore.protocol.sampling import EngineSamplingParams

LOGPROBS: Final = "message.output_text.logprobs"
_REFUSED: Final = {
    "background": "leave it out, and read the response as a stream",
    "conversation": "use previous_response_id, or send all items",
    "prompt": "send instructions and input",
    "prompt_logprobs": "use chat completions or completions",
    "use_beam_search": "leave it out",
}
_REPEATED: Final = (
    "instructions", "previous_response_id", "max_output_tokens", "max_tool_calls", "user",
    "safety_identifier", "prompt_cache_key",
)  # fmt: skip
_SAMPLED: Final = ("temperature", "top_p", "presence_penalty", "frequency_penalty")


class ReasoningConfig(msgspec.Struct):
    """effort: for the template; "none" turns thinking off. summary: any value has the reasoning
    sent, whole, as a summary. generate_summary: its former name."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None

    @property
    def wants_summary(self) -> bool:
        return bool(self.summary or self.generate_summary)


class TextConfig(msgspec.Struct):
    """format: a chat's response_format, schema fields inline. verbosity: has no effect."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(SamplingFields, kw_only=True):
    """The request. Fields from `max_tool_calls` on are accepted and have no effect."""

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    max_tool_calls: int | None = None
    truncation: str | None = None
    stream_options: Any = None
    user: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Any = None
    safety_identifier: str | None = None
    service_tier: Any = None

    def params(self, recommended: EngineSamplingParams) -> SamplingParams:
        """Return the sampling parameters; raises as `SamplingFields.sampling_params`."""
        for name, remedy in _REFUSED.items():
            value = getattr(self, name)
            if value is not None and value is not False:
                raise bad_request(f"{name} is not supported: {remedy}", name)
        if self.n not in (None, 1):
            raise bad_request("a response has one sample: leave n out", "n")
        if not 0 <= (self.top_logprobs or 0) <= MAX_TOP_LOGPROBS:
            raise bad_request(f"top_logprobs is 0 to {MAX_TOP_LOGPROBS}", "top_logprobs")
        return self.sampling_params(recommended, self.max_output_tokens, self.num_top_logprobs)

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of top logprobs; None: no logprobs are requested."""
        wanted = LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
        return (self.top_logprobs or 0) if wanted else None

    def options(self, settings: AppSettings, tools: ResponseTools) -> ChatOptions:
        form = self.text.format if self.text else None
        given = effort_kwargs(self.reasoning.effort if self.reasoning else None)
        return ChatOptions(
            tools=tools.tools,
            tool_choice=tools.choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=form,
            **template_options(settings, given | (self.chat_template_kwargs or {})),
        )

    def repeated_fields(
        self, model: str, params: SamplingParams, tools: ResponseTools
    ) -> dict[str, Any]:
        text = self.text or TextConfig()
        reasoning = self.reasoning or ReasoningConfig()
        return {
            "model": model,
            **{name: getattr(self, name) for name in _REPEATED},
            **{name: getattr(params, name) for name in _SAMPLED},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "tool_choice": self.tool_choice or "auto",
            "tools": tools.shown,
            "top_logprobs": self.top_logprobs or 0,
            "text": {
                "format": text.format or {"type": "text"},
                "verbosity": text.verbosity or "medium",
            },
            "reasoning": {
                "effort": reasoning.effort,
                "summary": reasoning.summary or reasoning.generate_summary,
            },
            "truncation": "disabled",
            "background": False,
            "service_tier": "default",
            "metadata": self.metadata or {},
        }


async def serve(exchange: Exchange) -> None:
    request = await exchange.read(ResponsesRequest)
    exchange.field_names = {
        "response_format": "text.format",
        "].function.": "].",
        "max_tokens": "max_output_tokens",
    }
    model = exchange.check_model(request.model)
    client = exchange.client
    params = request.params(client.model_card.default_sampling)
    exchange.note_params(params, request.stream)
    check_num_messages(exchange, request.input)
    tools = read_response_tools(request.tools, request.tool_choice)
    exchange.note_ignored([f"tools[type={kind}]" for kind in tools.dropped])
    store = exchange.state.responses
    # Ids of the response and of its items share the key: `find_item` finds the one by the other.
    key = uuid.uuid4().hex
    before = _conversation_before(store, request.previous_response_id)
    items = ItemReader(key, lambda item_id: find_item(store, item_id)).read(request.input)
    messages = messages_of([*before, *items], request.instructions)
    options = request.options(exchange.settings, tools)
    stream = await submit_chat(exchange, request, messages, params, f"resp_{key}", options)
    is_stored = store.is_on and request.store is not False
    fields = request.repeated_fields(model, params, tools)
    fields["store"] = is_stored
    fields["system_fingerprint"] = client.model_card.numerics_fingerprint
    style = ResponseStyle(
        key=key,
        created_s=int(time.time()),
        request_fields=fields,
        num_top_logprobs=request.num_top_logprobs,
        custom_tools=tools.custom,
        reasoning_as_summary=request.reasoning is not None and request.reasoning.wants_summary,
    )
    keep = _keeper(store, style.id, before, items) if is_stored else None
    kind = ResponseStreamEncoder if request.stream else ResponseEncoder
    await Delivery(exchange, [stream], kind(style, keep)).run()


def find_item(store: ResponseStore, item_id: str) -> Item | None:
    """Return an item of a stored response, whose key is the middle part of the item's id."""
    parts = item_id.split("_")
    stored = store.get(f"resp_{parts[1]}") if len(parts) == 3 else None
    for item in stored.items if stored is not None else ():
        if item["id"] == item_id:
            found: Item = item
            return found
    return None


def _conversation_before(store: ResponseStore, response_id: str | None) -> list[Item]:
    if response_id is None:
        return []
    param = "previous_response_id"
    if not store.is_on:
        raise bad_request(
            "this server stores no responses: leave previous_response_id out, and send all items",
            param,
        )
    stored = store.get(response_id)
    if stored is None:
        raise bad_request(
            f"the response {response_id!r} is not stored: send all items",
            param,
            "previous_response_not_found",
        )
    return stored.items


def _keeper(store: ResponseStore, response_id: str, before: list[Item], items: list[Item]) -> Keep:
    def keep(body: bytes, output: list[Item]) -> None:
        whole = [*before, *items, *output]
        store.put(response_id, StoredResponse(body, whole))

    return keep


async def get(exchange: Exchange) -> None:
    stored = _stored(exchange)
    if exchange.query().get("stream", "false").lower() == "true":
        raise bad_request("a stored response cannot be streamed: leave stream out", "stream")
    await exchange.reply(200, stored.body)


async def delete(exchange: Exchange) -> None:
    _stored(exchange)
    exchange.state.responses.remove(exchange.path_id)
    await exchange.reply_json({"id": exchange.path_id, "object": "response", "deleted": True})


def _stored(exchange: Exchange) -> StoredResponse:
    stored = exchange.state.responses.get(exchange.path_id)
    if stored is None:
        raise HttpError(404, f"the response {exchange.path_id[:200]!r} is not stored", "not_found")
    return stored
