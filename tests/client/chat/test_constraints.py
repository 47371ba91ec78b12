"""What an answer must be: of OpenAI's response_format and tool_choice, as structured outputs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from nanocore.client.chat.constraints import constraint, read_response_format, with_reasoning
from nanocore.client.chat.parsing.formats import TOOL_PARSERS, Formats
from nanocore.client.chat.tools import (
    MAX_TOOLS,
    ToolChoice,
    calls_schema,
    read_tool_choice,
    read_tools,
)
from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.fields import MAX_FREE_PREFIXES
from nanocore.protocol.structured_outputs import ReasoningMarks, StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {
    "structures": [{"begin": "<f>", "schema": {"type": "null"}, "end": "</f>"}],
    "triggers": ["<f"],
}
JSON = StructuredOutputsParams(json=SCHEMA)
LENIENT = StructuredOutputsParams(json=SCHEMA, lenient=[""])
AUTO = ToolChoice("auto")


def tools(strict: bool = False) -> Any:
    names = {"f": strict, "g": False}
    return read_tools(
        [{"function": {"name": n, "parameters": SCHEMA, "strict": s}} for n, s in names.items()]
    )


class Answer:
    """As a pydantic model."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return SCHEMA


@pytest.mark.parametrize(
    ("response_format", "wanted"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutputsParams(json_object=True)),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, LENIENT),
        ({"type": "json_object", "schema": SCHEMA}, LENIENT),
        ({"type": "json_object", "schema": None}, StructuredOutputsParams(json_object=True)),
        ({"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}, JSON),
        (Answer, JSON),
        ({"type": "structural_tag", **TAG}, StructuredOutputsParams(structural_tag=TAG)),
    ],
)
def test_response_formats_are_structured_outputs(response_format: Any, wanted: Any) -> None:
    got = read_response_format(response_format)
    assert (got and got.for_engine()) == (wanted and wanted.for_engine())


@pytest.mark.parametrize(
    "response_format",
    ["json", 5, [], {}, {"type": "xml"}, {"type": "json_schema"}, object,
     {"type": "json_schema", "json_schema": {"name": "x"}},
     {"type": "json_schema", "json_schema": {"schema": "{}"}},
     {"type": "json_object", "schema": "{}"}],
)  # fmt: skip
def test_other_response_formats_are_refused(response_format: Any) -> None:
    with pytest.raises(InvalidRequestError, match="response_format is one of"):
        read_response_format(response_format)


def test_a_named_tool_is_its_arguments() -> None:
    for name, wanted in (("f", JSON), ("g", LENIENT)):
        choice = read_tool_choice({"function": {"name": name}}, tools(strict=True))
        assert constraint(tools(strict=True), choice, True, JSON, "hermes") == wanted


@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_are_an_array(parallel: bool) -> None:
    given = tools(strict=True)
    wanted = constraint(given, ToolChoice("required"), parallel, None, None)
    schema = calls_schema(given, parallel)
    assert wanted == StructuredOutputsParams(json=schema, lenient=["/$defs/1"])


def test_an_answer_that_may_call_is_free_unless_a_format_binds() -> None:
    assert constraint(tools(), AUTO, True, None, "hermes") is None
    assert constraint([], ToolChoice("none"), True, None, "hermes") is None
    assert constraint([], ToolChoice("none"), True, JSON, "hermes") is JSON

    assert constraint(tools(), AUTO, True, JSON, None) == JSON
    assert constraint([], AUTO, True, JSON, "hermes") == JSON


def test_calls_of_strict_tools_match_their_schemas_where_the_form_is_known() -> None:
    assert constraint(tools(strict=True), AUTO, True, None, "mistral") is None
    wanted = constraint(tools(strict=True), AUTO, True, None, "hermes")
    assert wanted is not None
    tag = wanted.for_engine().structural_tag
    assert tag is not None
    (structure,) = tag.structures
    assert (structure.begin, structure.end) == ("<tool_call>\n", "\n</tool_call>")
    schema = json.loads(structure.schema)
    calls = [call["properties"]["name"] for call in schema["anyOf"]]
    assert calls == [{"enum": ["f"]}, {"enum": ["g"]}]
    assert [part.get("properties") for part in schema["$defs"].values()] == [
        SCHEMA["properties"],
        None,
    ]


@pytest.mark.parametrize(
    ("tool_format", "prefixes"),
    [
        ("hermes", ["<tool_call>"]),
        ("qwen3_coder", ["<function=", "<tool_call>"]),
        ("seed_oss", ["<function=", "<seed:tool_call>"]),
        ("mistral", ["[TOOL_CALLS]"]),
        ("deepseek_v3", ["<\uff5ctool\u2581calls\u2581begin\uff5c>"]),
        ("llama3_json", ["<|python_tag|>", '{"name": "f"', '{"name": "g"']),
        ("pythonic", ["<|python_start|>", "[f(", "[g("]),
        ("lfm2", ["<|tool_call_start|>", "[f(", "[g("]),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_an_answer_is_of_a_format_or_begins_as_a_call_does(
    tool_format: str, prefixes: list[str], strict: bool
) -> None:
    wanted = constraint(tools(strict=strict), AUTO, True, JSON, tool_format)
    assert wanted == replace(JSON, free_prefixes=prefixes)


def test_harmonys_channels_exclude_formats_and_grammars() -> None:
    with pytest.raises(InvalidRequestError, match="'harmony' have no opening mark; leave one out"):
        constraint(tools(), AUTO, True, JSON, "harmony")

    with pytest.raises(InvalidRequestError, match="harmony"):
        with_reasoning(JSON, Formats("harmony", "harmony"), False)


def test_as_many_tools_as_are_allowed_may_be_called_beside_a_format() -> None:
    many = [replace(tools()[0], name=f"f{i}") for i in range(MAX_TOOLS)]
    for tool_format in TOOL_PARSERS.keys() - {"harmony", "openai"}:
        wanted = constraint(many, AUTO, True, JSON, tool_format)
        assert wanted is not None
        assert 0 < len(wanted.free_prefixes) <= MAX_FREE_PREFIXES
        assert all(len(prefix) > 3 for prefix in wanted.free_prefixes)


@pytest.mark.parametrize(
    ("reasoning", "in_reasoning", "marks"),
    [
        (None, False, None),
        ("qwen3", False, ReasoningMarks(begin="<think>", end="</think>")),
        ("deepseek_r1", True, ReasoningMarks(end="</think>")),
        ("mistral", False, ReasoningMarks(begin="[THINK]", end="[/THINK]")),
    ],
)
def test_a_model_that_thinks_does_so_before(reasoning: Any, in_reasoning: bool, marks: Any) -> None:
    assert with_reasoning(JSON, Formats(reasoning=reasoning), in_reasoning).reasoning == marks


def test_marks_that_are_asked_for_are_not_changed() -> None:
    marked = StructuredOutputsParams(json=SCHEMA, reasoning=ReasoningMarks(end="so:"))
    assert with_reasoning(marked, Formats(reasoning="qwen3"), True) is marked
