"""A chat request: messages and options become a prompt, sampling parameters and a parser."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypedDict, cast

from msgspec.structs import replace

from nanocore.client.chat.chat_messages import ChatMessage
from nanocore.client.chat.constraints import (
    FormNames,
    constraint,
    names_of_calls,
    names_of_format,
    read_response_format,
    with_reasoning,
)
from nanocore.client.chat.events import Text
from nanocore.client.chat.parsing.formats import (
    Formats,
    detect_formats,
    marks_of,
    wrap_in_reasoning,
)
from nanocore.client.chat.parsing.reasoning import (
    DEEPSEEK_TURN,
    OPENING_MARKS,
    PlainTextParser,
    prompt_opens_reasoning,
)
from nanocore.client.chat.parsing.stream_reader import (
    Marks,
    OutputParser,
    ParsedEvent,
    Steps,
    StreamReader,
)
from nanocore.client.chat.parsing.tool_parser import NewId, ToolParser
from nanocore.client.chat.template import CHATML_END, ChatTemplates, TemplateOptions
from nanocore.client.chat.tools import (
    Tool,
    ToolChoice,
    loosened,
    read_tool_choice,
    read_tools,
)
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import InvalidRequestError, quoted
from nanocore.protocol.sampling import SamplingParams
from nanocore.protocol.structured_outputs import FormTooLargeError, StructuredOutputsParams

_TAIL_TOKENS: Final = 32
"""Tokens at a prompt's end that are searched for an open reasoning mark."""


class ChatOptions(TypedDict, total=False):
    """Options of a chat; names are OpenAI's and vLLM's.

    tools: in OpenAI's shape. tool_choice: "auto", "none" (the model does not see the tools),
    "required" or {"type": "function", "function": {"name": ...}}. parallel_tool_calls: more than
    one call is allowed (default: True). response_format: see `constraints`. chat_template_kwargs:
    for the template; names must be in allowed_template_kwargs (default: DEFAULT_TEMPLATE_KWARGS).
    add_generation_prompt: open the assistant's turn; by default unless the last message is
    continued. continue_final_message: the response continues the last message. tool_parser,
    reasoning_parser: the model's format; "auto", the default, detects it from the template, None
    treats everything as text. chat_template: replaces the model's; see `Tokenizer.templates`.
    """

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    response_format: Any
    chat_template_kwargs: Mapping[str, Any] | None
    allowed_template_kwargs: Collection[str]
    add_generation_prompt: bool | None
    continue_final_message: bool
    tool_parser: str | None
    reasoning_parser: str | None
    chat_template: str | None


class PreparedChat(NamedTuple):
    """Prompt and parameters to send, and the response's parsers by sample index.

    reasoning_end: mark that ends the model's reasoning, if there is one. omits_tools: the
    model does not see the request's tools. form_names: the caller's names of the structured output.
    """

    prompt_token_ids: array[int]
    params: SamplingParams
    new_parser: Callable[[int], OutputParser]
    reasoning_end: str | None
    omits_tools: bool
    form_names: FormNames


def prepare_chat(
    messages: Sequence[Mapping[str, Any]],
    options: ChatOptions,
    tokenizer: Tokenizer,
    params: SamplingParams,
    max_tokens: float = math.inf,
) -> PreparedChat:
    """Render and tokenize a conversation; takes milliseconds, or up to the template's time limit.

    Raises:
        InvalidRequestError: the template rejects it, or a message or an option is invalid.
        ContextLengthError: it has far more than max_tokens.
        TypeError: there is no option of this name.
    """
    _check(options, params)
    tools = read_tools(options.get("tools"))
    choice = read_tool_choice(options.get("tool_choice"), tools)
    if choice.mode == "none":
        tools = []
    templates = tokenizer.templates(options.get("chat_template"))
    omits_tools = bool(tools) and templates.dialect.omits_tools
    formats = _formats(options, templates)
    is_known = templates.dialect.mentions_tools or formats.tools is not None
    if omits_tools and choice.mode == "auto" and not is_known:
        raise InvalidRequestError(
            "this model's chat template has no tools: leave them out, or force a call by "
            "tool_choice",
            "tools",
        )
    adapted = templates.dialect.adapt(messages)
    token_ids = _encode(adapted, tools, options, tokenizer, max_tokens)
    in_reasoning = formats.reasoning is not None and _ends_in_reasoning(
        token_ids, options, tokenizer, formats.reasoning
    )
    form, names = _form(tools, choice, options, params, formats, in_reasoning)
    if form is not None:
        params = replace(params, structured_outputs=form)
    if choice.mode in ("required", "named"):  # the end of a call is not part of its arguments
        params = replace(params, include_stop_str_in_output=False)
    if options.get("chat_template") == "chatml":
        params = _ended_by(CHATML_END, params, tokenizer)
    special = tokenizer.special_texts
    marks = marks_of(formats, has_tools=bool(tools))
    dropped: Collection[str] = ()
    if params.skip_special_tokens and not marks.isdisjoint(special):
        params = replace(params, skip_special_tokens=False)
        dropped = special - marks

    def new_parser(index: int) -> OutputParser:
        parser = _parser(formats, tools, choice, in_reasoning, index)
        if options.get("parallel_tool_calls") is False:
            parser = _OneCallParser(parser)
        return SpecialTextFilter(parser, dropped) if dropped else parser

    end = formats.reasoning_end
    return PreparedChat(array("i", token_ids), params, new_parser, end, omits_tools, names)


def _ended_by(end: str, params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Let the end of a turn end the response, also of a model that does not know it as an end."""
    token_id = tokenizer.backend.token_to_id(end)
    if token_id is not None:
        return replace(params, stop_token_ids=[*params.stop_token_ids, token_id])
    given = [params.stop] if isinstance(params.stop, str) else params.stop or []
    return replace(params, stop=[*given, end])


def _parser(
    formats: Formats, tools: Sequence[Tool], choice: ToolChoice, in_reasoning: bool, index: int
) -> OutputParser:
    inner: OutputParser = PlainTextParser(index)
    if choice.tool is not None:
        inner = NamedToolParser(choice.tool.name, index, formats.new_id)
    elif choice.mode == "required":
        inner = RequiredToolsParser(tools, index, formats.new_id)
    elif formats.tool_parser is not None and tools:
        inner = formats.tool_parser(tools, index)
    return wrap_in_reasoning(formats, inner, in_reasoning=in_reasoning, index=index)


class _OneCallParser:
    """Drops all calls but the first, as the model is not told that it may call only once."""

    def __init__(self, inner: OutputParser) -> None:
        self._inner = inner

    def feed(self, delta: str) -> list[ParsedEvent]:
        return self._kept(self._inner.feed(delta))

    def finish(self) -> list[ParsedEvent]:
        return self._kept(self._inner.finish())

    def _kept(self, events: list[ParsedEvent]) -> list[ParsedEvent]:
        return [event for event in events if not getattr(event, "tool_index", 0)]


def _ends_in_reasoning(
    token_ids: list[int], options: ChatOptions, tokenizer: Tokenizer, reasoning: str
) -> bool:
    if options.get("continue_final_message"):
        return prompt_opens_reasoning(tokenizer.decode(token_ids, skip_special_tokens=False))
    # Marks that a template opens are at the prompt's end; marks that users wrote are earlier.
    end = tokenizer.decode(token_ids[-_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
    if reasoning == "deepseek_r1":  # the model writes the mark, and some models omit it
        named = options.get("reasoning_parser", "auto") != "auto" and not end.endswith("</think>")
        return named or end.endswith((*OPENING_MARKS, DEEPSEEK_TURN))
    return end.endswith(OPENING_MARKS)


def _check(options: ChatOptions, params: SamplingParams) -> None:
    for name, value in options.items():
        if name not in ChatOptions.__annotations__:
            raise TypeError(f"chat() got an unexpected keyword argument {name!r}")
        if name in ("tool_parser", "reasoning_parser") and not isinstance(value, str | None):
            raise InvalidRequestError(
                f'{name}={quoted(value)}: the name of a parser, "auto", or None for none'
            )
        if name == "chat_template" and not isinstance(value, str | None):
            raise InvalidRequestError(
                f"{name}={quoted(value)}: a text, or None for the model's own"
            )
        if name == "parallel_tool_calls" and not isinstance(value, bool | None):
            raise InvalidRequestError(f"{name}={quoted(value)}: True or False")
    if not params.detokenize:
        raise InvalidRequestError("a chat needs text: leave out detokenize=False")


def _encode(
    messages: list[dict[str, Any]],
    tools: Sequence[Tool],
    options: ChatOptions,
    tokenizer: Tokenizer,
    max_tokens: float,
) -> list[int]:
    given = {
        name: value for name, value in options.items() if name in TemplateOptions.__annotations__
    }
    given["tools"] = [tool.source for tool in tools] or None
    return tokenizer.encode_chat(
        cast("list[ChatMessage]", messages),
        options.get("add_generation_prompt"),
        max_tokens,
        options.get("chat_template"),
        **cast("TemplateOptions", given),
    )


def _formats(options: ChatOptions, templates: ChatTemplates) -> Formats:
    found = detect_formats(templates.text)
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
    in_reasoning: bool,
) -> tuple[StructuredOutputsParams | None, FormNames]:
    """Return the structured output, reasoning included, and the caller's names for it.

    With very many tools only names and strict tools' arguments are constrained.
    """
    response_format = options.get("response_format")
    wanted = read_response_format(response_format)
    is_format = wanted is not None and choice.mode in ("none", "auto")
    names = names_of_format(response_format) if is_format else names_of_calls(tools, choice)
    parallel = options.get("parallel_tool_calls") is not False
    try:
        form = constraint(tools, choice, parallel, wanted, formats.tools)
    except FormTooLargeError:
        names = names._replace(left_out=["tools[*].parameters"])
        with names.in_errors():
            form = constraint(loosened(tools), choice, parallel, wanted, formats.tools)
    if params.structured_outputs is not None:
        if form is not None:
            raise InvalidRequestError(
                "structured_outputs together with a response_format or forced tool calls: give one "
                "of them"
            )
        form, names = params.structured_outputs, FormNames()
    with names.in_errors():
        return form and with_reasoning(form, formats, in_reasoning), names


class NamedToolParser(ToolParser):
    """Reads the whole text as the arguments of one call of this tool.

    The call begins with the first text, or at the end if there is none, because it was forced.
    """

    is_bare = True

    def __init__(self, name: str, index: int = 0, new_id: NewId | None = None) -> None:
        super().__init__((), index, new_id)
        self._name = name

    def block(self, opener: str) -> Steps[None]:
        yield from self.fill(1)
        self.begin(self._name)
        yield from self.before(Marks(()), self.add)


class RequiredToolsParser(ToolParser):
    """Reads [{"name": ..., "parameters" or "arguments": {...}}, ...].

    The grammar allows nothing else, so other text is the beginning of a call that was cut, and is
    dropped.
    """

    is_bare = True

    def feed(self, delta: str) -> list[ParsedEvent]:
        return [event for event in super().feed(delta) if not isinstance(event, Text)]

    def finish(self) -> list[ParsedEvent]:
        return [event for event in super().finish() if not isinstance(event, Text)]

    def block(self, opener: str) -> Steps[None]:
        yield from self.space()
        if (yield from self.accept("[")):
            yield from self.call_array()


class SpecialTextFilter(StreamReader):
    """Drops these texts before another parser reads the rest; the longest match first.

    For formats whose marks are special tokens: the detokenizer then keeps special tokens, and all
    others are dropped here. A model that spells one out in plain tokens loses it, too.
    """

    def __init__(self, inner: OutputParser, dropped: Collection[str]) -> None:
        super().__init__()
        self._inner = inner
        self._dropped = Marks(dropped)

    def finish(self) -> list[ParsedEvent]:
        return super().finish() + self._inner.finish()

    def run(self) -> Steps[None]:
        mark: str | None = ""
        while mark is not None:
            mark = yield from self.until(self._dropped, self._pass)

    def _pass(self, text: str) -> None:
        self._out += self._inner.feed(text)
