"""Parsers of calls and reasoning: each shape says the same at every split, at a linear cost."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanocore.client.chat.chat_request import SpecialTextFilter
from nanocore.client.chat.parsing.stream_reader import OutputParser, StreamReader
from tests.campaign import examples
from tests.client.chat.parsed import events_of, joined, parser_of
from tests.client.chat.shapes import SHAPES, Shape

PROPERTY = settings(max_examples=examples(300), deadline=None, derandomize=True)
BY_NAME = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.tools}-{s.name}")
FORMATS = sorted({(s.tools, s.reasoning) for s in SHAPES}, key=str)
WORDS = sorted(
    {"<think>", "</think>", "<tool_call>", "</tool_call>", "<function=", "now", ">", "\n", " "}
    | {"<parameter=", "x", "</parameter>", "</function>", "<|python_tag|>", "[TOOL_CALLS]", "["}
    | {"]", "{", "}", '"', '"name"', ":", '"now"', ",", '"arguments"', "\\", "\\u00e9", "'", "("}
    | {")", "=", "1", "<|channel|>", "analysis", "<|message|>", "<|end|>", "to=", "<", "[ARGS]"}
    | {"\\ud83d", "\\ude00", '{"name": "now", "arguments": ', "[now(", "null", ";", '"id"'}
)


def parser_for(shape: Shape) -> OutputParser:
    return parser_of(shape.tools, shape.reasoning, in_reasoning=shape.in_reasoning)


@BY_NAME
def test_a_recorded_shape_says_what_it_says(shape: Shape) -> None:
    assert joined(events_of(parser_for(shape), [shape.text])) == shape.said


@BY_NAME
def test_a_recorded_shape_says_the_same_wherever_it_is_cut_in_two(shape: Shape) -> None:
    for cut in range(len(shape.text) + 1):
        pieces = [shape.text[:cut], shape.text[cut:]]
        assert joined(events_of(parser_for(shape), pieces)) == shape.said, cut


@BY_NAME
def test_a_recorded_shape_says_the_same_character_by_character(shape: Shape) -> None:
    assert joined(events_of(parser_for(shape), shape.text)) == shape.said


@BY_NAME
def test_what_is_cut_off_anywhere_says_the_same_in_one_piece_and_in_many(shape: Shape) -> None:
    for end in range(len(shape.text)):
        whole = joined(events_of(parser_for(shape), [shape.text[:end]]))
        assert joined(events_of(parser_for(shape), shape.text[:end])) == whole, end


@BY_NAME
def test_arguments_of_complete_calls_are_json(shape: Shape) -> None:
    if any(word in shape.name for word in ("unfinished", "truncated", "as a string")):
        return
    for said in shape.said:
        if said[0] == "call" and said[2]:
            assert isinstance(json.loads(said[2]), dict)


@PROPERTY
@given(st.data())
def test_any_text_says_the_same_at_any_split(data: st.DataObject) -> None:
    tools, reasoning = data.draw(st.sampled_from(FORMATS))
    opened = data.draw(st.booleans())
    words = data.draw(st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=30))
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = joined(events_of(parser_of(tools, reasoning, in_reasoning=opened), [text]))
    for split in (pieces, list(text)):
        assert joined(events_of(parser_of(tools, reasoning, in_reasoning=opened), split)) == whole


@PROPERTY
@given(st.data())
def test_a_damaged_shape_says_the_same_at_any_split_and_loses_no_text(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(SHAPES))
    text = shape.text
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = start + data.draw(st.integers(0, 5))
        text = text[:start] + data.draw(st.sampled_from(["", *WORDS])) + text[end:]
    whole = joined(events_of(parser_for(shape), [text]))
    cut = data.draw(st.integers(0, len(text)))
    assert joined(events_of(parser_for(shape), [text[:cut], text[cut:]])) == whole
    assert joined(events_of(parser_for(shape), text)) == whole
    if {kind for kind, *_ in whole} <= {"text"} and shape.tools != "harmony":
        if shape.reasoning is None:
            assert "".join(said for _, said in whole) == text


@PROPERTY
@given(st.text(alphabet="a<tool_cl>[ \n{"), st.sampled_from(["hermes", "mistral", "qwen3_coder"]))
def test_text_without_a_call_loses_nothing(text: str, tools: str) -> None:
    assert joined(events_of(parser_of(tools), [text])) == ([("text", text)] if text else [])


def test_text_is_shown_as_soon_as_it_cannot_be_a_mark() -> None:
    parser = parser_of("hermes")
    shown = [[e.delta for e in parser.feed(t) if hasattr(e, "delta")] for t in ("a", "<to", "p \n")]
    assert shown == [["a"], [], ["<top"]]


def test_arguments_are_streamed_as_they_come() -> None:
    parser = parser_of("hermes")
    assert len(parser.feed('<tool_call>{"name": "now", "arguments": {"a')) == 2
    assert [e.delta for e in parser.feed('b": "c') if hasattr(e, "delta")] == ['b": "c']


MAX_WAITING_CHARS = 64
"""No format has a mark as long as this."""

CALL = '<tool_call>{"name": "now", "arguments": {"a": '
HOSTILE = [
    ("hermes", "", "<"),
    ("hermes", "", "<tool_call"),
    ("hermes", "", "<tool_call>{"),
    ("hermes", "", "\n"),
    ("hermes", "", "<tool_call> "),
    ("hermes", "<tool_call>", " "),
    ("hermes", '<tool_call>{"name": "', "a"),
    ("hermes", '<tool_call>{"arguments": ', "["),
    ("hermes", '<tool_call>{"', "k\\"),
    ("hermes", CALL, "["),
    ("hermes", CALL, "</tool_cal"),
    ("hermes", CALL + '"', "\\"),
    ("hermes", CALL + '"', "a"),
    ("hermes", '<tool_call>{"name": "now", "arguments": "', "\\ud83d"),
    ("hermes", '<tool_call>{"name": "now"', ', "a": 1'),
    ("qwen3_coder", "<function=", "a"),
    ("qwen3_coder", "<function=f>", "<parameter=k>"),
    ("qwen3_coder", "<function=f><parameter=city>", "\n"),
    ("qwen3_coder", "<function=get_weather><parameter=tags>", "["),
    ("llama3_json", "", "{"),
    ("llama3_json", "", '{"name": "now", "parameters": {}};'),
    ("mistral", "", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS][", '{"name": "now"},'),
    ("mistral", "[TOOL_CALLS]", "n"),
    ("pythonic", "[now(a=", "["),
    ("pythonic", "[now(a='", "\\"),
    ("pythonic", "[now(a=", "1"),
    ("pythonic", "[", "now(),"),
    ("pythonic", "[", "n"),
    ("lfm2", "<|tool_call_start|>[", '{"name": "now"},'),
    ("harmony", "", "<|channel|>"),
    ("harmony", "", " "),
    ("harmony", "", "<|end|> x"),
    ("harmony", "<|channel|>final<|message|>", "<|end|> "),
    ("deepseek_v3", "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581begin"),
    (None, "<think>", "\n"),
    (None, "<think>", "</think"),
    (None, "", " "),
]
BY_TEXT = pytest.mark.parametrize(("tools", "prefix", "repeated"), HOSTILE)


def num_calls(parser: OutputParser, pieces: Iterable[str]) -> int:
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        for piece in pieces:
            parser.feed(piece)
        parser.finish()
    finally:
        sys.setprofile(None)
    return count


@BY_TEXT
def test_twice_the_text_costs_twice_the_calls(
    tools: str | None, prefix: str, repeated: str
) -> None:
    for cut in (lambda text: text, lambda text: [text]):
        costs = []
        for num_chars in (600, 1200):
            text = prefix + repeated * (num_chars // len(repeated))
            costs.append(num_calls(parser_of(tools, "qwen3"), cut(text)))
        assert costs[1] <= 2.1 * costs[0] + 50
        assert costs[1] <= 100 * 1200


@BY_TEXT
def test_no_more_than_a_mark_is_read_again(tools: str | None, prefix: str, repeated: str) -> None:
    parser = parser_of(tools, "qwen3" if tools is None else None)
    assert isinstance(parser, StreamReader)
    for character in prefix + repeated * (2000 // len(repeated)):
        parser.feed(character)
        assert len(parser._text) - parser._at <= MAX_WAITING_CHARS


@pytest.mark.parametrize("num_chars", [30_000, pytest.param(10**6, marks=pytest.mark.campaign)])
@BY_TEXT
def test_long_texts_come_through_whole(
    tools: str | None, prefix: str, repeated: str, num_chars: int
) -> None:
    text = prefix + repeated * (num_chars // len(repeated))
    said = joined(events_of(parser_of(tools), [text]))
    pieces = [text[i : i + 4096] for i in range(0, len(text), 4096)]
    assert joined(events_of(parser_of(tools), pieces)) == said
    if tools != "harmony" and [kind for kind, *_ in said] == ["text"]:
        assert said == [("text", text)]


def test_the_filter_of_special_tokens_reads_nothing_twice() -> None:
    dropped = ["<|a|>", "<|ab|>", *(f"<|reserved_{i}|>" for i in range(500))]
    for repeated in ("<", "<|a", "<|reserved_", "<|a|>"):
        costs = []
        for num_chars in (600, 1200):
            stage = SpecialTextFilter(parser_of(None), dropped)
            costs.append(num_calls(stage, repeated * (num_chars // len(repeated))))
        assert costs[1] <= 2.1 * costs[0] + 50
