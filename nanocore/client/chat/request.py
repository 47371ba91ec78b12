"""A chat as it is asked for, and what becomes of it: a prompt, sampling parameters, a parser."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from nanocore.client.chat.constraints import constraint, read_response_format, with_reasoning
from nanocore.client.chat.parsing.factory import (
    Formats,
    detect_formats,
    make_parser,
    prompt_opens_reasoning,
)
from nanocore.client.chat.parsing.parser import OutputParser
from nanocore.client.chat.template import DEFAULT_TEMPLATE_KWARGS
from nanocore.client.chat.tool_choice import ToolChoice, read_tool_choice
from nanocore.client.chat.tools import Tool, read_tools
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.sampling import SamplingParams

_TAIL_TOKENS: Final = 16
"""An open mark stands at the very end of a generation prompt."""


class ChatOptions(TypedDict, total=False):
    """What may be asked of a chat beside its messages; names are OpenAI's and vLLM's.

    tools: in OpenAI's shape. tool_choice: "auto", "none" (the model does not see the tools),
    "required" or {"type": "function", "function": {"name": ...}}. parallel_tool_calls: more than
    one call may be forced; True. response_format: see `constraints`. chat_template_kwargs: for the
    template; names must be in allowed_template_kwargs, by default DEFAULT_TEMPLATE_KWARGS.
    add_generation_prompt: begin the answer; True. continue_final_message: the answer goes on where
    the last message ends. tool_parser, reasoning_parser: how the model writes such things; "auto",
    the default, asks its template, None takes all for text.
    """

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool
    response_format: Any
    chat_template_kwargs: Mapping[str, Any] | None
    allowed_template_kwargs: Collection[str]
    add_generation_prompt: bool
    continue_final_message: bool
    tool_parser: str | None
    reasoning_parser: str | None


class PreparedChat(NamedTuple):
    """What is sent, and what reads the answer. new_parser: of the sample of this index."""

    prompt_token_ids: array[int]
    params: SamplingParams
    new_parser: Callable[[int], OutputParser]


def prepare_chat(
    messages: Sequence[Mapping[str, Any]],
    options: ChatOptions,
    tokenizer: Tokenizer,
    params: SamplingParams,
) -> PreparedChat:
    """Render and tokenize it; takes milliseconds, or as long as a template may take.

    Raises:
        InvalidRequestError: the template rejects it, or something in it is not what it must be.
        TypeError: an option of no such name.
    """
    for name in options:
        if name not in ChatOptions.__annotations__:
            raise TypeError(f"chat() got an unexpected keyword argument {name!r}")
    tools = read_tools(options.get("tools"))
    choice = read_tool_choice(options.get("tool_choice"), tools)
    if choice.mode == "none":
        tools = []
    token_ids = _encode(messages, tools, options, tokenizer)
    formats = _formats(options, tokenizer)
    in_reasoning = formats.reasoning is not None and prompt_opens_reasoning(
        tokenizer.decode(token_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
    )
    form = _form(tools, choice, options, params, formats)
    if form is not None:
        form = with_reasoning(form, in_reasoning, formats.reasoning is not None)
        params = replace(params, structured_outputs=form)
    ...


def _encode(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool],
    options: ChatOptions,
    tokenizer: Tokenizer,
) -> list[int]:
    goes_on = options.get("continue_final_message", False)
    return tokenizer.encode_chat(
        tokenizer.template_dialect.adapt(messages),
        options.get("add_generation_prompt", True) and not goes_on,
        tools=[tool.source for tool in tools] or None,
        chat_template_kwargs=options.get("chat_template_kwargs"),
        allowed_template_kwargs=options.get("allowed_template_kwargs", DEFAULT_TEMPLATE_KWARGS),
        continue_final_message=goes_on,
    )


def _formats(options: ChatOptions, tokenizer: Tokenizer) -> Formats:
    """As the caller names them, or as the template shows them."""
    found = detect_formats(tokenizer.chat_template_text)
    tools = options.get("tool_parser", "auto")
    reasoning = options.get("reasoning_parser", "auto")
    return Formats(
        found.tools if tools == "auto" else tools,
        found.reasoning if reasoning == "auto" else reasoning,
    )


def _form(
    tools: list[Tool],
    choice: ToolChoice,
    options: ChatOptions,
    params: SamplingParams,
    formats: Formats,
) -> StructuredOutputsParams | None:
    """What the answer must be."""
    wanted = read_response_format(options.get("response_format"))
    parallel = options.get("parallel_tool_calls", True)
    form = constraint(tools, choice, parallel, wanted, formats.tools)
    if form is not None and params.structured_outputs is not None:
        raise InvalidRequestError(
            "sampling_params.structured_outputs beside a response_format or forced tool calls: an "
            "answer has one form; give one of them"
        )
    return form if form is not None else params.structured_outputs
