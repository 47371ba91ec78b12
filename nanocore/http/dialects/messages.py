"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's chat.

What Anthropic's servers do beside the model (their own tools, context management, containers) is
not done here, and the header `nanocore-ignored` names it.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec.structs import replace

from nanocore.client import SamplingParams
from nanocore.client.chat.chat_messages import ChatMessage
from nanocore.client.chat.chat_request import ChatOptions
from nanocore.http.answer_id import AnswerId
from nanocore.http.delivery import Delivery
from nanocore.http.dialects.chat_options import (
    chat_token_ids,
    check_num_messages,
    submit_chat,
    template_options,
)
from nanocore.http.dialects.message_blocks import chat_messages, is_prefilled
from nanocore.http.dialects.message_encoders import (
    MessageAnswerEncoder,
    MessageStreamEncoder,
    MessageStyle,
)
from nanocore.http.dialects.message_fields import (
    CountTokensRequest,
    MessagesRequest,
    OutputFormat,
    ToolChoiceField,
    ToolDefinition,
)
from nanocore.http.errors import bad_request
from nanocore.http.exchange import Exchange
from nanocore.protocol.sampling import EngineSamplingParams

_REFUSED: Final = ("n", "prompt_logprobs")
_TOOL_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS: Final = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Of Anthropic's efforts, those that templates know."""


async def serve(exchange: Exchange) -> None:
    """Answer one."""
    request = await exchange.read(MessagesRequest)
    model = exchange.check_model(request.model)
    client = exchange.client
    params = sampling_params(request, client.model_card.default_sampling)
    exchange.note_params(params, request.stream)
    check_num_messages(exchange, request.messages)
    messages, options = conversation(exchange, request)
    answer_id = AnswerId("msg_", request.request_id)
    engine_id = answer_id.engine_id()
    answer = await submit_chat(exchange, request, messages, params, engine_id, options)
    style = MessageStyle(answer_id.text, model)
    kind = MessageStreamEncoder if request.stream else MessageAnswerEncoder
    await Delivery(exchange, [answer], kind(style)).run()


async def count_tokens(exchange: Exchange) -> None:
    """How many tokens a request's prompt has, cached ones included; nothing is generated."""
    request = await exchange.read(CountTokensRequest)
    exchange.check_model(request.model)
    check_num_messages(exchange, request.messages)
    messages, options = conversation(exchange, request)
    token_ids = await chat_token_ids(exchange, messages, options)
    await exchange.reply_json({"input_tokens": len(token_ids)})


def sampling_params(request: MessagesRequest, recommended: EngineSamplingParams) -> SamplingParams:
    """What the sampler is asked for.

    Raises:
        HttpError, InvalidRequestError: as `SamplingFields.sampling_params`.
    """
    for name in _REFUSED:
        if getattr(request, name) is not None:
            raise bad_request(f"{name} is not served: leave it out", name)
    params = request.sampling_params(recommended, request.max_tokens, None)
    if request.stop_sequences:
        params = replace(params, stop=request.stop_sequences)
    return params


def conversation(
    exchange: Exchange, request: CountTokensRequest
) -> tuple[list[ChatMessage], ChatOptions]:
    """The messages, and what is asked for beside them; what is ignored is noted.

    Raises:
        HttpError: something in it is not served.
    """
    tools = [tool for tool in request.tools or () if tool.type in (None, "custom")]
    others = [tool for tool in request.tools or () if tool.type not in (None, "custom")]
    exchange.note_ignored([f"tools[{tool.type}]" for tool in others])
    choice = request.tool_choice
    has_config = request.output_config is not None and request.output_config.format is not None
    exchange.field_names = {
        "response_format": "output_config.format" if has_config else "output_format",
        "].function.": "].",
        "].parameters": "].input_schema",
    }
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
            f"tool_choice is {choice.type!r}, and there are no tools of the client's own: add one"
        )
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return _TOOL_CHOICES[choice.type]


def _response_format(request: CountTokensRequest) -> dict[str, Any] | None:
    """What the answer's text must be."""
    wanted: OutputFormat | None = request.output_format
    if request.output_config is not None and request.output_config.format is not None:
        wanted = request.output_config.format
    if wanted is None:
        return None
    if wanted.type != "json_schema" or wanted.schema is None:
        raise bad_request('an output format is {"type": "json_schema", "schema": {...}}')
    return {"type": "json_schema", "schema": wanted.schema, "strict": True}


def _template_kwargs(request: CountTokensRequest) -> dict[str, Any]:
    """Thinking and effort, by the names that templates have for them."""
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
