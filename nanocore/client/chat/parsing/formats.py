"""Registry of tool and reasoning formats, and detection of the format of a chat template.

`TOOL_PARSERS` and `REASONING_PARSERS` may be extended; names are vLLM's where it has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec

from nanocore.client.chat.parsing.call_formats import (
    DeepseekV3Parser,
    HermesParser,
    Lfm2Parser,
    Llama3JsonParser,
    MistralParser,
    PythonicParser,
)
from nanocore.client.chat.parsing.harmony import HarmonyParser
from nanocore.client.chat.parsing.qwen3_coder import Qwen3CoderParser, SeedOssParser
from nanocore.client.chat.parsing.reasoning import (
    DEEPSEEK_TURN,
    MistralThinkParser,
    SeedOssThinkParser,
    ThinkParser,
)
from nanocore.client.chat.parsing.stream_reader import OutputParser
from nanocore.client.chat.parsing.tool_parser import NewId, ToolParser, make_call_id
from nanocore.protocol.errors import InvalidRequestError

T = TypeVar("T")


TOOL_PARSERS: Final[dict[str, type[ToolParser]]] = {
    "deepseek_v3": DeepseekV3Parser,
    "deepseek_v31": DeepseekV3Parser,
    "harmony": HarmonyParser,
    "hermes": HermesParser,
    "lfm2": Lfm2Parser,
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
REASONING_PARSERS: Final[dict[str, type[ThinkParser | HarmonyParser]]] = {
    "deepseek_r1": ThinkParser,
    "harmony": HarmonyParser,
    "mistral": MistralThinkParser,
    "openai_gptoss": HarmonyParser,
    "qwen3": ThinkParser,
    "seed_oss": SeedOssThinkParser,
}


class Formats(msgspec.Struct, frozen=True):
    """Formats of a model's tool calls and reasoning; None: no such format, all is text.

    Properties and functions that need a parser raise InvalidRequestError for an unknown format.
    """

    tools: str | None = None
    reasoning: str | None = None

    @property
    def tool_parser(self) -> type[ToolParser] | None:
        return None if self.tools is None else _known(TOOL_PARSERS, self.tools, "tool calls")

    @property
    def reasoning_parser(self) -> type[ThinkParser | HarmonyParser] | None:
        """Parser of reasoning; Harmony's reads calls, too, so it is used alone."""
        if self.reasoning is None:
            return None
        return _known(REASONING_PARSERS, self.reasoning, "reasoning")

    @property
    def new_id(self) -> NewId:
        """Function that makes call ids: some templates check the form of past ids."""
        return make_call_id if self.tool_parser is None else self.tool_parser.default_id

    @property
    def reasoning_end(self) -> str | None:
        """Mark that ends reasoning; None if there is none, or more than two marks."""
        marks = () if self.reasoning_parser is None else self.reasoning_parser.marks
        return marks[1] if len(marks) == 2 else None


def wrap_in_reasoning(
    formats: Formats, inner: OutputParser, *, in_reasoning: bool = False, index: int = 0
) -> OutputParser:
    """Return the parser, wrapped in the one for reasoning if the formats have reasoning."""
    parser = formats.reasoning_parser
    if parser is None:
        return inner
    if issubclass(parser, ThinkParser):
        return parser(inner, in_reasoning, index)
    return inner if isinstance(inner, parser) else parser(index=index)


def marks_of(formats: Formats, has_tools: bool = True) -> frozenset[str]:
    """Return the texts that the formats' parsers must see even if they are special tokens."""
    parsers = formats.tool_parser if has_tools else None, formats.reasoning_parser
    return frozenset(mark for parser in parsers if parser is not None for mark in parser.marks)


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
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("List of tools: ", "<|im_start|>")),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('"name"', '"parameters"', "<|start_header_id|>")),
)
"""Formats, and texts that must all occur in their templates; the first match wins."""
