"""What an answer must be: of OpenAI's response_format and tool_choice, as structured outputs."""

from __future__ import annotations

from typing import Any

import pytest

from nanocore.client.chat.constraints import constraint, read_response_format, with_reasoning
from nanocore.client.chat.parsing.formats import Formats
from nanocore.client.chat.tool_choice import ToolChoice, calls_schema, read_tool_choice
from nanocore.client.chat.tools import read_tools
from nanocore.protocol.errors import InvalidRequestError
from nanocore.protocol.structured_outputs import ReasoningMarks, StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {
    "structures": [{"begin": "<f>", "schema": {"type": "null"}, "end": "</f>"}],
    "triggers": ["<f"],
}
JSON = StructuredOutputsParams(json=SCHEMA)
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
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, JSON),
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
     {"type": "json_schema", "json_schema": {"schema": "{}"}}],
)  # fmt: skip
def test_other_response_formats_are_refused(response_format: Any) -> None:
    with pytest.raises(InvalidRequestError, match="response_format is one of"):
        read_response_format(response_format)


def test_a_named_tool_is_its_arguments() -> None:
    choice = read_tool_choice({"function": {"name": "g"}}, tools())
    assert constraint(tools(), choice, True, JSON, "hermes") == JSON


@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_are_an_array(parallel: bool) -> None:
    wanted = constraint(tools(), ToolChoice("required"), parallel, None, None)
    assert wanted == StructuredOutputsParams(json=calls_schema(tools(), parallel))


def test_an_answer_that_may_call_is_free() -> None:
    assert constraint(tools(), AUTO, True, None, "hermes") is None
    assert constraint([], ToolChoice("none"), True, None, "hermes") is None
    assert constraint([], ToolChoice("none"), True, JSON, "hermes") is JSON


def test_calls_of_strict_tools_match_their_schemas_where_the_form_is_known() -> None:
    assert constraint(tools(strict=True), AUTO, True, None, "mistral") is None
    wanted = constraint(tools(strict=True), AUTO, True, None, "hermes")
    assert wanted is not None
    tag = wanted.for_engine().structural_tag
    assert tag is not None
    begins = [one.begin for one in tag.structures]
    assert begins == [f'<tool_call>\n{{"name": "{n}", "arguments": ' for n in ("f", "g")]
    assert ["integer" in one.schema for one in tag.structures] == [True, False]


def test_an_answer_cannot_be_a_call_or_of_a_format() -> None:
    with pytest.raises(InvalidRequestError, match="an answer has one form"):
        constraint(tools(), AUTO, True, JSON, "hermes")


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


def test_a_form_of_many_channels_is_held_to_no_grammar() -> None:
    with pytest.raises(InvalidRequestError, match="harmony"):
        with_reasoning(JSON, Formats("harmony", "harmony"), False)
