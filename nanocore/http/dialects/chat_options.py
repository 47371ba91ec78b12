"""What the dialects of conversations ask for alike, in the words of `ChatOptions`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

from nanocore.client import SamplingParams
from nanocore.client.chat.answer_stream import AnswerStream
from nanocore.client.chat.chat_messages import ChatMessage, is_long
from nanocore.client.chat.chat_request import ChatOptions, prepare_chat
from nanocore.client.chat.template import DEFAULT_TEMPLATE_KWARGS
from nanocore.http.attended import attended
from nanocore.http.dialects.sampling import SamplingFields
from nanocore.http.errors import bad_request
from nanocore.http.exchange import Exchange
from nanocore.http.settings import AppSettings
from nanocore.protocol.errors import ContextLengthError, quoted


def is_function(tool: Mapping[str, Any]) -> bool:
    """Whether it is a tool that the client runs; of other types are those of a vendor's servers."""
    return bool(tool.get("type", "function") == "function")


def chosen_tools(
    tools: Sequence[dict[str, Any]] | None, choice: str | dict[str, Any] | None
) -> tuple[list[dict[str, Any]] | None, str | dict[str, Any] | None]:
    """The functions that the model sees, and the choice among them.

    Raises:
        HttpError: as `read_allowed_tools`.
    """
    functions = [tool for tool in tools or () if is_function(tool)]
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        names, choice = read_allowed_tools(choice, set(map(_name, functions)))
        functions = [tool for tool in functions if _name(tool) in names]
    return functions or None, choice if functions or choice != "auto" else None


def read_allowed_tools(choice: Mapping[str, Any], known: Collection[str]) -> tuple[set[str], str]:
    """Names of the tools that a tool_choice of this type allows, and its mode.

    known: names of the request's tools. Types of tools that are not served are passed over.

    Raises:
        HttpError: it has none, or names one that is not known.
    """
    told = choice.get("allowed_tools", choice)  # the Responses API has its fields outside
    tools, mode = (
        (told.get("tools"), told.get("mode", "auto")) if isinstance(told, dict) else (None, None)
    )
    if not isinstance(tools, list) or mode not in ("auto", "required"):
        raise bad_request(
            "tool_choice of type allowed_tools has tools, a list, and mode, auto or required, not "
            f"{quoted(choice)}",
            "tool_choice",
        )
    place = "tool_choice.allowed_tools.tools" if told is not choice else "tool_choice.tools"
    allowed = set()
    for i, tool in enumerate(tools):
        if isinstance(tool, dict) and tool.get("type", "function") not in ("function", "custom"):
            continue
        name = _name(tool) if isinstance(tool, dict) else ""
        if name not in known:
            raise bad_request(
                f"{place}[{i}] is {quoted(tool)}, which is none of the tools: name one of them",
                f"{place}[{i}]",
            )
        allowed.add(name)
    return allowed, mode


def _name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function", tool)
    return str(function.get("name")) if isinstance(function, dict) else ""


def template_options(settings: AppSettings, given: Mapping[str, Any]) -> ChatOptions:
    """What all dialects say to the template and the parsers. given: names that it gets."""
    return ChatOptions(
        chat_template_kwargs={**settings.default_chat_template_kwargs, **given},
        allowed_template_kwargs=(
            DEFAULT_TEMPLATE_KWARGS
            | set(settings.allowed_template_kwargs)
            | set(settings.default_chat_template_kwargs)
        ),
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
    )


def check_num_messages(exchange: Exchange, messages: str | Sequence[object]) -> None:
    """Refuse more messages than the model has room for tokens, before any work is done on them.

    A text is one.

    Raises:
        ContextLengthError: there are more.
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
    """The conversation's answer, which is to come.

    Raises:
        NanocoreError: as `AsyncEngineClient.submit_chat`. Disconnected: as `attended`.
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
    # A short one is submitted before a client would be seen to leave.
    has_much_text = is_long(messages, options.get("tools"))
    return await (attended(exchange, submitting) if has_much_text else submitting)


async def chat_token_ids(
    exchange: Exchange, messages: Sequence[Mapping[str, Any]], options: ChatOptions
) -> list[int]:
    """The prompt that the conversation would be; raises likewise."""
    client = exchange.client
    max_model_len = client.model_card.max_model_len
    preparing = client.with_tokenizer(
        lambda tokenizer: prepare_chat(
            messages, options, tokenizer, SamplingParams(), max_model_len
        ),
        is_long(messages, options.get("tools")),
    )
    return [*(await attended(exchange, preparing)).prompt_token_ids]


def effort_kwargs(effort: str | None) -> dict[str, Any]:
    """What a template gets of OpenAI's effort of reasoning; "none" turns thinking off."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}
