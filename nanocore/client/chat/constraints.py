"""Structured outputs of an answer: a forced tool call, or a response format.

A forced answer is JSON that matches a schema, whatever the model's own format of tool calls is, as
in vLLM. Reasoning models reason first. `FormNames` lets errors and `not_held` use the caller's
names for the parts of a schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from nanocore.client.chat.parsing.formats import Formats
from nanocore.client.chat.tools import (
    Tool,
    ToolChoice,
    arguments_schema,
    call_schema,
    calls_schema,
    loosened,
    with_equal_schemas,
)
from nanocore.protocol.errors import InvalidRequestError, NanocoreError, quoted
from nanocore.protocol.fields import MAX_FREE_PREFIXES
from nanocore.protocol.structured_outputs import ReasoningMarks, StructuredOutputsParams

_PART: Final = re.compile(
    r"structured_outputs\.(?:json|structural_tag\.structures\[0\]\.schema) at '/\$defs/(\d+)"
)
_WHOLE: Final = re.compile(r"structured_outputs(?:\.(?:json|structural_tag)\b|(?![\w.]))")


class FormNames(NamedTuple):
    """Caller's names of a structured output, of its "$defs", and of parts that were left out.

    whole: "" if the caller set structured_outputs. parts: names of "$defs" by number.
    """

    whole: str = ""
    parts: Sequence[str] = ()
    left_out: Sequence[str] = ()

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Rename the schema's parts in errors of the engine to the caller's names."""
        try:
            yield
        except InvalidRequestError as error:
            self.rename(error)
            raise

    def rename(self, error: NanocoreError) -> None:
        """Rename the schema's parts in this error to the caller's names."""
        text = self.named(str(error))
        if text != str(error):
            error.args = (text,)
            if isinstance(error, InvalidRequestError):
                error.param = self.whole.partition(":")[0]

    def not_held(self, pointers: Sequence[str]) -> list[str]:
        """Return names of keywords that are not enforced. pointers: theirs in the sent schema."""
        places = [self.named(f"structured_outputs.json at '{pointer}") for pointer in pointers]
        return [*self.left_out, *(place.replace(" at '", "", 1) for place in places)]

    def named(self, text: str) -> str:
        """Return the text with the caller's names in place of the engine's."""
        if self.parts:
            text = _PART.sub(lambda found: f"{self.parts[int(found[1])]} at '", text)
        return _WHOLE.sub(self.whole, text) if self.whole else text


def names_of_format(response_format: object) -> FormNames:
    """Return the names of a response_format, by its type."""
    given: dict[str, Any] = response_format if isinstance(response_format, dict) else {}
    if given.get("type") not in ("json_schema", "json_object"):
        return FormNames("response_format")
    return FormNames(f"response_format{'.json_schema' * ('json_schema' in given)}.schema")


def names_of_calls(tools: Sequence[Tool], choice: ToolChoice) -> FormNames:
    """Return the names of the schemas of tool calls."""
    parts = [f"tools[{tool.name}].parameters" for tool in tools]
    if choice.tool is not None:
        return FormNames(parts[tools.index(choice.tool)])
    return FormNames("tools: the schema of all calls", parts)


_FORMATS: Final = (
    '{"type": "text"}, {"type": "json_object"}, perhaps with "schema": {...}, {"type": '
    '"json_schema", "json_schema": {"schema": {...}}} or {"type": "structural_tag", ...}'
)


def read_response_format(response_format: object) -> StructuredOutputsParams | None:
    """Read OpenAI's response_format, or a class with `model_json_schema()`; None is any text.

    Raises:
        InvalidRequestError: it is none of these, or its schema cannot be sent.
    """
    with names_of_format(response_format).in_errors():
        return _read_response_format(response_format)


def _read_response_format(response_format: object) -> StructuredOutputsParams | None:
    if response_format is None:
        return None
    if isinstance(response_format, type) and hasattr(response_format, "model_json_schema"):
        return StructuredOutputsParams(json=response_format.model_json_schema())
    if isinstance(response_format, dict):
        kind = response_format.get("type")
        if kind == "text":
            return None
        if kind == "json_object" and response_format.get("schema") is None:
            return StructuredOutputsParams(json_object=True)
        if kind == "structural_tag":
            return StructuredOutputsParams(structural_tag=response_format)
        if kind in ("json_schema", "json_object"):
            inner = response_format.get("json_schema", response_format)
            schema = inner.get("schema") if isinstance(inner, dict) else None
            if isinstance(schema, (dict, bool)):
                schema = _of_object(schema) if kind == "json_object" else schema
                lenient = [] if inner.get("strict") is True else [""]
                return StructuredOutputsParams(json=schema, lenient=lenient)
    raise InvalidRequestError(
        f"response_format is one of {_FORMATS}, not {quoted(response_format)}", "response_format"
    )


def _of_object(schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
    if isinstance(schema, bool):
        return schema and {"type": "object"}
    types = schema.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        raise InvalidRequestError(
            f"response_format.schema has the type {quoted(types)}, but json_object is an object: "
            'use the type "json_schema" for other values',
            "response_format.schema",
        )
    return {**schema, "type": "object"}


def constraint(
    tools: list[Tool],
    choice: ToolChoice,
    parallel_tool_calls: bool,
    response_format: StructuredOutputsParams | None,
    tool_format: str | None,
) -> StructuredOutputsParams | None:
    """Return the structured output that follows the reasoning; None allows any text.

    tool_format: the model's own format of tool calls. With hermes, calls of strict tools match
    their schemas even with tool_choice "auto". With a response format, calls are unconstrained text
    after the beginning of a call; a model without its own format cannot call then.

    Raises:
        InvalidRequestError: calls of this format have no beginning that distinguishes them.
    """
    if choice.tool is not None:
        lenient = [] if choice.tool.strict else [""]
        return StructuredOutputsParams(json=arguments_schema(choice.tool), lenient=lenient)
    if choice.mode == "required":
        return StructuredOutputsParams(
            json=calls_schema(tools, parallel_tool_calls),
            lenient=[
                f"/$defs/{number}"
                for number, group in with_equal_schemas(tools).items()
                if not group[0].strict
            ],
        )
    if choice.mode == "auto" and response_format is not None:
        return _or_calls(response_format, tools, tool_format)
    if choice.mode == "auto" and tool_format == "hermes" and any(tool.strict for tool in tools):
        return StructuredOutputsParams(structural_tag=_hermes_calls(tools))
    return response_format


def _or_calls(
    response_format: StructuredOutputsParams, tools: list[Tool], tool_format: str | None
) -> StructuredOutputsParams:
    parser = Formats(tool_format).tool_parser
    if parser is None or not tools:
        return response_format
    prefixes = parser.beginnings(tools)
    if not prefixes:
        raise InvalidRequestError(
            "response_format cannot be combined with optional tools: calls in the format "
            f"{tool_format!r} "
            'have no opening mark; leave one out, or decide with tool_choice "none", "required" '
            "or a tool's name"
        )
    return replace(response_format, free_prefixes=_shortened(prefixes))


def _shortened(prefixes: list[str]) -> list[str]:
    """Shorten prefixes until few enough different ones remain to be sent."""
    length = max(map(len, prefixes))
    while len(prefixes) > MAX_FREE_PREFIXES:
        length -= 1
        prefixes = list(dict.fromkeys(prefix[:length] for prefix in prefixes))
    return prefixes


def with_reasoning(
    wanted: StructuredOutputsParams, formats: Formats, in_reasoning: bool
) -> StructuredOutputsParams:
    """Allow reasoning before the constrained part. in_reasoning: the prompt has opened it.

    Raises:
        InvalidRequestError: the model's reasoning is not a single text between two marks.
    """
    parser = formats.reasoning_parser
    if parser is None or wanted.reasoning:
        return wanted
    if len(parser.marks) != 2:
        raise InvalidRequestError(
            f"the model's response format ({formats.reasoning}) cannot be constrained: leave out "
            "response_format, structured_outputs and a forced tool_choice"
        )
    begin, end = parser.marks
    reasoning = ReasoningMarks(begin="" if in_reasoning else begin, end=end)
    return replace(wanted, reasoning=reasoning)


def _hermes_calls(tools: list[Tool]) -> dict[str, Any]:
    call = call_schema(loosened(tools), "arguments")
    structure = {"begin": "<tool_call>\n", "schema": call, "end": "\n</tool_call>"}
    return {"structures": [structure], "triggers": ["<tool_call>"]}
