"""Registry of tool and reasoning formats, and detection of the format of a chat template.

`TOOL_PARSERS` and `REASONING_PARSERS` may be extended; names are vLLM's where it has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol, TypeVar

import msgspec

from nanocore.client.chat.parsing.call_formats import (
    DeepseekV3Parser,
    HermesParser,
    Llama3JsonParser,
    MistralParser,
    PythonicParser,
)
from nanocore.client.chat.parsing.harmony import HarmonyParser
from nanocore.client.chat.parsing.qwen3_coder import Qwen3CoderParser, SeedOssParser
from nanocore.client.chat.parsing.reasoning import (
    DEEPSEEK_TURN,
    MistralThinkParser,
    PlainTextParser,
    SeedOssThinkParser,
    ThinkParser,
)
from nanocore.client.chat.parsing.stream_reader import OutputParser
from nanocore.client.chat.parsing.tool_parser import NewId, make_call_id
from nanocore.client.chat.tools import Tool
from nanocore.protocol.errors import InvalidRequestError

T = TypeVar("T")


class Formats(msgspec.Struct, frozen=True):
    """Formats of a model's tool calls and reasoning; None: no such format, all is text."""

    tools: str | None = None
    reasoning: str | None = None


class ToolFormat(Protocol):
    """Constructor of a parser of text and calls, such as a ToolParser class."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that the parser must see even if they are special tokens."""
        ...

    def __call__(self, tools: Sequence[Tool], index: int, new_id: NewId | None) -> OutputParser: ...


class ReasoningFormat(Protocol):
    """Constructor of a parser of reasoning around another parser, such as ThinkParser."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that the parser must see even if they are special tokens."""
        ...

    def __call__(self, inner: OutputParser, in_reasoning: bool, index: int) -> OutputParser: ...


class _HarmonyReasoning:
    """Harmony's tool parser also reads reasoning, so it is used alone."""

    marks = HarmonyParser.marks

    def __call__(self, inner: OutputParser, in_reasoning: bool, index: int) -> OutputParser:
        return inner if isinstance(inner, HarmonyParser) else HarmonyParser(index=index)


TOOL_PARSERS: Final[dict[str, ToolFormat]] = {
    "deepseek_v3": DeepseekV3Parser,
    "deepseek_v31": DeepseekV3Parser,
    "harmony": HarmonyParser,
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "llama4_json": Llama3JsonParser,
    "llama4_pythonic": PythonicParser,
    "mistral": MistralParser,
    "openai": HarmonyParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
    "qwen3_xml": Qwen3CoderParser,
    "seed_oss": SeedOssParser,
}
REASONING_PARSERS: Final[dict[str, ReasoningFormat]] = {
    "deepseek_r1": ThinkParser,
    "harmony": _HarmonyReasoning(),
    "mistral": MistralThinkParser,
    "openai_gptoss": _HarmonyReasoning(),
    "qwen3": ThinkParser,
    "seed_oss": SeedOssThinkParser,
}


def make_parser(
    formats: Formats,
    tools: Sequence[Tool],
    *,
    in_reasoning: bool = False,
    index: int = 0,
    new_id: NewId | None = None,
) -> OutputParser:
    """Return a parser of one sample's text. Without tools, it reads no calls.

    in_reasoning: the prompt ends within the reasoning. index: the sample's. new_id: makes ids of
    calls; None uses the format's own.

    Raises:
        InvalidRequestError: there is no such format.
    """
    inner: OutputParser = PlainTextParser(index)
    if formats.tools is not None:
        tool_format = _known(TOOL_PARSERS, formats.tools, "tool calls")
        if tools:
            inner = tool_format(tools, index, new_id)
    return wrap_in_reasoning(formats, inner, in_reasoning=in_reasoning, index=index)


def wrap_in_reasoning(
    formats: Formats, inner: OutputParser, *, in_reasoning: bool = False, index: int = 0
) -> OutputParser:
    """Return the parser, wrapped in the one for reasoning if the formats have reasoning.

    Raises:
        InvalidRequestError: there is no such format.
    """
    if formats.reasoning is None:
        return inner
    return _known(REASONING_PARSERS, formats.reasoning, "reasoning")(inner, in_reasoning, index)


def new_id_of(formats: Formats) -> NewId:
    """Return the function that makes call ids: some templates check the form of past ids."""
    new_id: NewId = make_call_id
    if formats.tools is not None:
        parser = _known(TOOL_PARSERS, formats.tools, "tool calls")
        new_id = getattr(parser, "default_id", make_call_id)
    return new_id


def beginnings_of(tool_format: str, tools: Sequence[Tool]) -> list[str]:
    """Return the texts that begin a tool call in this format; [] where it has no such mark.

    Raises:
        InvalidRequestError: there is no such format.
    """
    parser = _known(TOOL_PARSERS, tool_format, "tool calls")
    beginnings = getattr(parser, "beginnings", None)
    return [] if beginnings is None else list(beginnings(tools))


def reasoning_end(formats: Formats) -> str | None:
    """Return the mark that ends reasoning; None if there is none, or more than two marks."""
    if formats.reasoning is None:
        return None
    marks = _known(REASONING_PARSERS, formats.reasoning, "reasoning").marks
    return marks[1] if len(marks) == 2 else None


def marks_of(formats: Formats, has_tools: bool = True) -> frozenset[str]:
    """Return the texts that the formats' parsers must see even if they are special tokens.

    Raises:
        InvalidRequestError: there is no such format.
    """
    marks: set[str] = set()
    if formats.tools is not None and has_tools:
        marks.update(_known(TOOL_PARSERS, formats.tools, "tool calls").marks)
    if formats.reasoning is not None:
        marks.update(_known(REASONING_PARSERS, formats.reasoning, "reasoning").marks)
    return frozenset(marks)


def _known(parsers: Mapping[str, T], name: str, what: str) -> T:
    parser = parsers.get(name)
    if parser is None:
        raise InvalidRequestError(
            f"unknown parser of {what}: {name!r}; known: {', '.join(sorted(parsers))}"
        )
    return parser


def detect_formats(template_text: str | None) -> Formats:
    """Return the formats whose marks occur in a chat template's source."""
    source = template_text or ""
    if "<|channel|>" in source:
        return Formats("harmony", "harmony")
    tools = next((name for name, marks in _TOOL_SIGNS if all(m in source for m in marks)), None)
    if any(mark in source for mark in _OTHER_FORMATS):
        tools = None
    if tools == "llama3_json" and "<function=" in source:  # Functionary's
        tools = None
    reasoning = None
    if "<seed:think>" in source:
        reasoning = "seed_oss"
    elif "</think>" in source or "<think>" in source:
        reasoning = "deepseek_r1" if DEEPSEEK_TURN in source else "qwen3"
    elif "[THINK]" in source:
        reasoning = "mistral"
    return Formats(tools, reasoning)


_OTHER_FORMATS: Final = ("<arg_key>", "<tool_calls>", "<invoke")
"""Marks of formats without a parser here; their templates share other marks with known formats."""
_TOOL_SIGNS: Final = (
    ("deepseek_v3", ("<\uff5ctool\u2581calls\u2581begin\uff5c>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama4_json", ("<|python_start|>", '"parameters"')),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('"name"', '"parameters"', "<|start_header_id|>")),
)
"""Formats, and texts that must all occur in their templates; the first match wins."""
