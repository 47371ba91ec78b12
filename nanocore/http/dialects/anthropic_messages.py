"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's messages.

Work that Anthropic's servers do in addition to the model (server tools, context management,
containers) is not supported; the header `nanocore-ignored` lists such fields of a request.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from nanocore.client import SamplingParams
from nanocore.client.chat.chat_messages import ChatMessage
from nanocore.client.chat.chat_request import ChatOptions
from nanocore.http.delivery import Delivery
from nanocore.http.dialects.chat_options import (
    chat_token_ids,
    check_num_messages,
    submit_chat,
    template_options,
)
from nanocore.http.dialects.message_blocks import (
    ContentBlock,
    MessageParam,
    chat_messages,
    is_prefilled,
)
from nanocore.http.dialects.message_encoders import (
    MessageEncoder,
    MessageStreamEncoder,
    MessageStyle,
)
from nanocore.http.dialects.request_fields import ResponseId, SamplingFields
from nanocore.http.exchange import Exchange
from nanocore.http.http_errors import bad_request
from nanocore.protocol.sampling import EngineSamplingParams

_TOOL_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS: Final = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Anthropic's effort values, mapped to those that templates know."""


class ToolDefinition(msgspec.Struct):
    """A tool. The client runs it if type is absent or "custom"; others are the vendor's."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoiceField(msgspec.Struct):
    """Whether tools may or must be called. name: the tool, with type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """type: the template learns of "enabled" and "disabled"; others leave it to the model."""

    type: str
    budget_tokens: int | None = None


class OutputFormat(msgspec.Struct):
    """Constraint on the response's text. type: only json_schema is supported."""

    type: str
    schema: dict[str, Any] | bool | None = None


class OutputConfig(msgspec.Struct):
    """effort: how much to think. format: of the text."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(SamplingFields, kw_only=True):
    """Fields that determine the prompt. Sampling fields are accepted and have no effect."""

    messages: list[MessageParam]
    model: str | None = None
    system: str | list[ContentBlock] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoiceField | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The request. metadata and service_tier are accepted and have no effect.

    stop_sequences: called `stop` in other dialects.
    """

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: Any = None
    service_tier: Any = None


async def serve(exchange: Exchange) -> None:
    request = await exchange.read(MessagesRequest)
    exchange.field_names = _field_names(request)
    model = exchange.check_model(request.model)
    client = exchange.client
    params = sampling_params(request, client.model_card.default_sampling)
    exchange.note_params(params, request.stream)
    check_num_messages(exchange, request.messages)
    messages, options = conversation(exchange, request)
    response_id = ResponseId("msg_", request.request_id, exchange.given_request_id)
    engine_id = response_id.engine_id()
    stream = await submit_chat(exchange, request, messages, params, engine_id, options)
    style = MessageStyle(response_id.text, model)
    kind = MessageStreamEncoder if request.stream else MessageEncoder
    await Delivery(exchange, [stream], kind(style)).run()


async def count_tokens(exchange: Exchange) -> None:
    request = await exchange.read(CountTokensRequest)
    exchange.field_names = _field_names(request)
    exchange.check_model(request.model)
    check_num_messages(exchange, request.messages)
    messages, options = conversation(exchange, request)
    token_ids = await chat_token_ids(exchange, messages, options)
    await exchange.reply_json({"input_tokens": len(token_ids)})


def _field_names(request: CountTokensRequest) -> dict[str, str]:
    """Return this dialect's names of what errors of the client and its chat name."""
    has_config = request.output_config is not None and request.output_config.format is not None
    return {
        "response_format": "output_config.format" if has_config else "output_format",
        "].function.": "].",
        "].parameters": "].input_schema",
        "stop=": "stop_sequences=",
        "stop[": "stop_sequences[",
    }


def sampling_params(request: MessagesRequest, recommended: EngineSamplingParams) -> SamplingParams:
    """Return the sampling parameters; raises as `SamplingFields.sampling_params`."""
    request.refuse("n", "prompt_logprobs")
    params = request.sampling_params(recommended, request.max_tokens, None)
    if request.stop_sequences:
        params = replace(params, stop=request.stop_sequences)
    return params


def conversation(
    exchange: Exchange, request: CountTokensRequest
) -> tuple[list[ChatMessage], ChatOptions]:
    """Return messages and options for the chat; ignored tools are noted in the exchange.

    Raises:
        HttpError: something in it is invalid or not supported.
    """
    tools = [tool for tool in request.tools or () if tool.type in (None, "custom")]
    others = [tool for tool in request.tools or () if tool.type not in (None, "custom")]
    exchange.note_ignored([f"tools[{tool.type}]" for tool in others])
    choice = request.tool_choice
    options = ChatOptions(
        tools=[_function(tool) for tool in tools] or None,
        tool_choice=None if choice is None else _tool_choice(choice, bool(tools)),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        response_format=_response_format(request),
        continue_final_message=is_prefilled(request.messages),
        **template_options(exchange.settings, _template_kwargs(request)),
    )
    return chat_messages(request.system, request.messages), options


def _function(tool: ToolDefinition) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
    if tool.strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoiceField, has_tools: bool) -> str | dict[str, Any] | None:
    if choice.type in ("auto", "none") and not has_tools:
        return None
    if not has_tools:
        raise bad_request(
            f"tool_choice is {choice.type!r}, but the request has no client tools: add one"
        )
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return _TOOL_CHOICES[choice.type]


def _response_format(request: CountTokensRequest) -> dict[str, Any] | None:
    wanted: OutputFormat | None = request.output_format
    if request.output_config is not None and request.output_config.format is not None:
        wanted = request.output_config.format
    if wanted is None:
        return None
    if wanted.type != "json_schema" or wanted.schema is None:
        raise bad_request('an output format is {"type": "json_schema", "schema": {...}}')
    return {"type": "json_schema", "schema": wanted.schema, "strict": True}


def _template_kwargs(request: CountTokensRequest) -> dict[str, Any]:
    """Return thinking and effort under the names that chat templates use."""
    given: dict[str, Any] = {}
    thinking = request.thinking
    if thinking is not None and thinking.type in ("enabled", "disabled"):
        given["enable_thinking"] = given["thinking"] = thinking.type == "enabled"
        if thinking.type == "enabled" and thinking.budget_tokens is not None:
            given["thinking_budget"] = thinking.budget_tokens
    effort = request.output_config.effort if request.output_config is not None else None
    if effort in _EFFORTS:
        given["reasoning_effort"] = _EFFORTS[effort]
    return given | (request.chat_template_kwargs or {})
