"""Parsing costs time linear in the text, whatever a model writes and however it is cut."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import pytest

from nanocore.client.chat.parsing.request_parsers import SpecialTextFilter
from nanocore.client.chat.parsing.stream_reader import OutputParser, StreamReader
from tests.client.chat.parsed import events_of, joined, parser_of

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
