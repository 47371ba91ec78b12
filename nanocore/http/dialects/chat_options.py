"""Conversations of any dialect: tools, template options, and submission to the engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from nanocore.client import SamplingParams
from nanocore.client.chat.answer_stream import AnswerStream
from nanocore.client.chat.chat_messages import ChatMessage, is_long
from nanocore.client.chat.chat_request import ChatOptions, prepare_chat
from nanocore.client.chat.template import BUILT_IN_TEMPLATES, DEFAULT_TEMPLATE_KWARGS
from nanocore.http.dialects.request_fields import SamplingFields
from nanocore.http.exchange import Exchange
from nanocore.http.http_errors import bad_request
from nanocore.http.server_settings import AppSettings
from nanocore.protocol.errors import ContextLengthError, quoted


def is_function(tool: Mapping[str, Any]) -> bool:
    """Whether the client runs the tool; the other types are run by a vendor's servers."""
    return bool(tool.get("type", "function") == "function")


def chosen_tools(
    tools: Sequence[dict[str, Any]] | None, choice: str | dict[str, Any] | None
) -> tuple[list[dict[str, Any]] | None, str | dict[str, Any] | None]:
    """Return the functions that the model sees, and the choice among them.

    Raises:
        HttpError: see `read_allowed_tools`.
    """
    functions = [tool for tool in tools or () if is_function(tool)]
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        names, choice = read_allowed_tools(choice, set(map(_name, functions)))
        functions = [tool for tool in functions if _name(tool) in names]
    return functions or None, choice if functions or choice != "auto" else None


def read_allowed_tools(choice: Mapping[str, Any], known: Collection[str]) -> tuple[set[str], str]:
    """Return the names and the mode of a tool_choice of type allowed_tools.

    Args:
        choice: the tool_choice. Tools of unsupported types are skipped.
        known: names of the request's tools.

    Raises:
        HttpError: it is malformed, or names an unknown tool.
    """
    # The Responses API has the fields in the choice itself, chat completions one level below.
    inner = choice.get("allowed_tools", choice)
    tools, mode = (
        (inner.get("tools"), inner.get("mode", "auto")) if isinstance(inner, dict) else (None, None)
    )
    if not isinstance(tools, list) or mode not in ("auto", "required"):
        raise bad_request(
            "a tool_choice of type allowed_tools needs tools, a list, and mode, auto or required; "
            f"this one is {quoted(choice)}",
            "tool_choice",
        )
    place = "tool_choice.tools" if inner is choice else "tool_choice.allowed_tools.tools"
    allowed = set()
    for i, tool in enumerate(tools):
        if isinstance(tool, dict) and tool.get("type", "function") not in ("function", "custom"):
            continue
        name = _name(tool) if isinstance(tool, dict) else ""
        if name not in known:
            raise bad_request(
                f"{place}[{i}] is {quoted(tool)}, which is not one of the tools: name one of them",
                f"{place}[{i}]",
            )
        allowed.add(name)
    return allowed, mode


def _name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function", tool)
    return str(function.get("name")) if isinstance(function, dict) else ""


def template_options(
    settings: AppSettings, given: Mapping[str, Any], chat_template: str | None = None
) -> ChatOptions:
    """Return the options that follow from the settings.

    given: the request's template variables. chat_template: the request's; a template is code, so it
    can only name one that is built in.

    Raises:
        HttpError: it names no such template.
    """
    if chat_template not in (None, *BUILT_IN_TEMPLATES):
        raise bad_request(
            f"chat_template can only name a built-in template ({', '.join(BUILT_IN_TEMPLATES)}): "
            "give another one to the server with --chat-template FILE",
            "chat_template",
        )
    return ChatOptions(
        chat_template=chat_template or settings.chat_template,
        chat_template_kwargs={**settings.default_chat_template_kwargs, **given},
        allowed_template_kwargs=(
            DEFAULT_TEMPLATE_KWARGS
            | set(settings.allowed_template_kwargs)
            | set(settings.default_chat_template_kwargs)
        ),
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
    )


def effort_kwargs(effort: str | None) -> dict[str, Any]:
    """Return template variables for OpenAI's reasoning effort; "none" turns thinking off."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def check_num_messages(exchange: Exchange, messages: str | Sequence[object]) -> None:
    """Refuse more messages than the model's context has tokens, before any work on them.

    Raises:
        ContextLengthError: there are more. A text is one message.
    """
    max_model_len = exchange.client.model_card.max_model_len
    if not isinstance(messages, str) and len(messages) > max_model_len:
        raise ContextLengthError(
            f"{len(messages)} messages, of a token or more each, and "
            f"max_model_len={max_model_len}: send fewer"
        )


async def submit_chat(
    exchange: Exchange,
    request: SamplingFields,
    messages: Sequence[Mapping[str, Any]],
    params: SamplingParams,
    request_id: str,
    options: ChatOptions,
) -> AnswerStream:
    """Submit the conversation and return the stream of its response.

    Raises:
        NanocoreError: see `AsyncEngineClient.submit_chat`.
        Disconnected: the client has gone.
    """
    submitting = exchange.client.submit_chat(
        cast("Sequence[ChatMessage]", messages),
        params,
        request_id,
        request.priority or 0,
        request.cache_salt,
        True,
        **options,
    )
    # A short one is submitted before a disconnect could be noticed.
    has_much_text = is_long(messages, options.get("tools"))
    return await (exchange.attended(submitting) if has_much_text else submitting)


async def chat_token_ids(
    exchange: Exchange, messages: Sequence[Mapping[str, Any]], options: ChatOptions
) -> list[int]:
    """Return the conversation's prompt; raises as `submit_chat`."""
    client = exchange.client
    max_model_len = client.model_card.max_model_len
    preparing = client.with_tokenizer(
        lambda tokenizer: prepare_chat(
            messages, options, tokenizer, SamplingParams(), max_model_len
        ),
        is_long(messages, options.get("tools")),
    )
    return [*(await exchange.attended(preparing)).prompt_token_ids]
