"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's messages.

Work that Anthropic's servers do in addition to the model (server tools, context management,
containers) is not supported; the header `nanocore-ignored` lists such fields of a request.

Messages of content blocks become the chat messages that templates know. Texts of one message are
joined. Tool results become messages of their own, before the text of the message that holds them.
Thinking and tool calls stay with the assistant's turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
from nanocore.http.dialects.message_encoders import MessageEncoder, MessageStreamEncoder
from nanocore.http.dialects.request_fields import ResponseId, SamplingFields
from nanocore.http.exchange import Exchange
from nanocore.http.http_errors import HttpError, bad_request
from nanocore.protocol.sampling import EngineSamplingParams

_BILLING: Final = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n?")
"""Claude Code's first line holds a number that differs in each request. Without its removal
the prefix cache would never hit."""
_TEXTS: Final = ("text", "document", "search_result", "tool_reference")


_TOOL_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS: Final = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Anthropic's effort values, mapped to those that templates know."""


class Source(msgspec.Struct):
    """Source of a document or an image. Only texts are read: data, or blocks in content."""

    type: str | None = None
    data: str | None = None
    content: str | list[ContentBlock] | None = None


class ContentBlock(msgspec.Struct):
    """A piece of a message's content. Which fields it has depends on its type."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    title: str | None = None
    source: str | Source | None = None
    tool_name: str | None = None


class MessageParam(msgspec.Struct):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock] | None = None


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
    kind = MessageStreamEncoder if request.stream else MessageEncoder
    await Delivery(exchange, [stream], kind(response_id.text, model)).run()


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
    request.refuse("n", "prompt_logprobs", "repetition_detection")
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


def chat_messages(
    system: str | list[ContentBlock] | None, turns: Sequence[MessageParam]
) -> list[ChatMessage]:
    """Return the conversation's messages.

    Raises:
        HttpError: a block has an unsupported type, lacks a field, or may not stand there.
    """
    if not turns:
        raise bad_request("messages is empty: send at least one message", "messages")
    instructions = [_system_text(system, "system")]
    messages: list[ChatMessage] = []
    tool_names: dict[str, str] = {}
    for number, turn in enumerate(turns):
        where = f"messages[{number}].content"
        if turn.role == "system":
            text = _system_text(turn.content, where)
            if not messages:
                instructions.append(text)
            else:
                messages.append({"role": "system", "content": text})
        elif turn.role == "user":
            messages += _user(_blocks(turn.content), where, tool_names)
        else:
            messages.append(_assistant(_blocks(turn.content), where, tool_names))
    instruction = "\n".join(filter(None, instructions))
    if instruction:
        messages.insert(0, {"role": "system", "content": instruction})
    return messages


def is_prefilled(turns: Sequence[MessageParam]) -> bool:
    """Whether the response continues the last message.

    Raises:
        HttpError: the last message calls tools, whose results are missing.
    """
    last = turns[-1] if turns else None
    if last is None or last.role != "assistant":
        return False
    if any(block.type == "tool_use" for block in _blocks(last.content)):
        raise bad_request(
            "the last message calls tools: send their tool_result blocks in a user message after it"
        )
    return True


def _blocks(content: str | list[ContentBlock] | None) -> list[ContentBlock]:
    return [ContentBlock("text", text=content)] if isinstance(content, str) else content or []


def _system_text(content: str | list[ContentBlock] | None, where: str) -> str:
    texts = [
        _BILLING.sub("", _text(block, f"{where}[{i}]"), count=1)
        if _BILLING.match(block.text or "")
        else _text(block, f"{where}[{i}]")
        for i, block in enumerate(_blocks(content))
    ]
    return "\n".join(filter(None, texts))


def _user(blocks: list[ContentBlock], where: str, tool_names: dict[str, str]) -> list[ChatMessage]:
    results: list[ChatMessage] = []
    texts = []
    for i, block in enumerate(blocks):
        if block.type == "tool_result":
            results.append(_tool_result(block, f"{where}[{i}]", tool_names))
        else:
            texts.append(_text(block, f"{where}[{i}]"))
    if texts or not results:
        results.append({"role": "user", "content": "\n".join(texts)})
    return results


def _tool_result(block: ContentBlock, where: str, tool_names: dict[str, str]) -> ChatMessage:
    call_id = _needed(block.tool_use_id, where, "tool_use_id")
    parts = _blocks(block.content)
    text = "\n".join(_text(part, f"{where}.content[{i}]") for i, part in enumerate(parts))
    if block.is_error and "error" not in text.lower():
        text = f"Error: {text}" if text else "Error"  # templates have no field for errors
    message: ChatMessage = {"role": "tool", "tool_call_id": call_id, "content": text}
    if call_id in tool_names:
        message["name"] = tool_names[call_id]
    return message


def _assistant(blocks: list[ContentBlock], where: str, tool_names: dict[str, str]) -> ChatMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    is_split = False
    for i, block in enumerate(blocks):
        place = f"{where}[{i}]"
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            call_id = _needed(block.id, place, "id")
            name = tool_names[call_id] = _needed(block.name, place, "name")
            function = {"name": name, "arguments": block.input or {}}
            calls.append({"id": call_id, "type": "function", "function": function})
            is_split = bool(texts)
        elif block.type != "redacted_thinking":
            texts.append("\n" * is_split + _text(block, place))
            is_split = False
    message: ChatMessage = {"role": "assistant"}
    if texts or not calls:
        message["content"] = "".join(texts)
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(block: ContentBlock, where: str) -> str:
    """Return the text of a block that holds text; raise HttpError for another one."""
    if block.type == "text":
        return _needed(block.text, where, "text", may_be_empty=True)
    if block.type == "tool_reference":
        return _needed(block.tool_name, where, "tool_name")
    if block.type == "search_result":
        source = block.source if isinstance(block.source, str) else None
        return _titled([block.title, source], block.content, f"{where}.content")
    if block.type == "document" and isinstance(block.source, Source):
        if block.source.type == "text":
            text = _needed(block.source.data, f"{where}.source", "data", may_be_empty=True)
            return _titled([block.title], text, where)
        if block.source.type == "content":
            return _titled([block.title], block.source.content, f"{where}.source.content")
    raise _unsupported(block, where)


def _titled(titles: list[str | None], content: str | list[ContentBlock] | None, where: str) -> str:
    """Join titles and texts. Inner blocks must be text, so recursion ends here."""
    texts = []
    for i, part in enumerate(_blocks(content)):
        if part.type != "text":
            place = f"{where}[{i}]"
            raise bad_request(
                f"{place} is of type {part.type[:64]!r}: only text is allowed here", place
            )
        texts.append(_text(part, f"{where}[{i}]"))
    return "\n".join(filter(None, [*titles, *texts]))


def _needed(value: str | None, where: str, name: str, may_be_empty: bool = False) -> str:
    if value is None or not (value or may_be_empty):
        raise bad_request(f"{where} has no {name}", f"{where}.{name}")
    return value


def _unsupported(block: ContentBlock, where: str) -> HttpError:
    kind = block.type[:64]
    if block.type in ("image", "document"):
        reason = "this model reads text only: leave it out, or send its text"
    elif block.type in ("text", "thinking", "redacted_thinking", "tool_use", "tool_result"):
        reason = "such a block is not allowed here"
    else:
        reason = f"the types {', '.join(_TEXTS)}, thinking, tool_use and tool_result are supported"
    return bad_request(f"{where} is of type {kind!r}: {reason}", where)
