"""Which parser a model gets, ids, forced answers, and special tokens taken out."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanocore.client.chat.chat_request import (
    NamedToolParser,
    RequiredToolsParser,
    SpecialTextFilter,
)
from nanocore.client.chat.events import Reasoning, Text, ToolArguments, ToolBegin
from nanocore.client.chat.parsing.call_formats import HermesParser
from nanocore.client.chat.parsing.formats import (
    TOOL_PARSERS,
    Formats,
    detect_formats,
    marks_of,
    wrap_in_reasoning,
)
from nanocore.client.chat.parsing.reasoning import PlainTextParser, prompt_opens_reasoning
from nanocore.protocol.errors import InvalidRequestError
from tests.campaign import examples
from tests.client.chat.parsed import TOOLS, events_of, joined, make_parser, parser_of
from tests.client.chat.shapes import HARMONY_SHAPES, HERMES, PARIS

PROPERTY = settings(max_examples=examples(200), deadline=None, derandomize=True)


def ids(formats: Formats, text: str) -> list[str]:
    events = events_of(make_parser(formats, TOOLS), [text])
    return [event.id for event in events if isinstance(event, ToolBegin)]


def test_ids_are_made_in_the_formats_manner_unless_the_model_has_one() -> None:
    made = ids(Formats("hermes"), HERMES + HERMES)
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", made_id) for made_id in made)
    assert made[0] != made[1]
    [made_id] = ids(Formats("mistral"), "[TOOL_CALLS]now{}")
    assert re.fullmatch(r"[A-Za-z0-9]{9}", made_id)
    assert ids(Formats("mistral"), "[TOOL_CALLS]now[CALL_ID]Ab3456789[ARGS]{}") == ["Ab3456789"]
    early = '<tool_call>{"id": "mine", "name": "now", "arguments": {}}</tool_call>'
    assert ids(Formats("hermes"), early) == ["mine"]


def test_events_carry_the_samples_index() -> None:
    text = f"<think>a</think>b{HERMES}"
    parser = make_parser(Formats("hermes", "qwen3"), TOOLS, index=3)
    assert {event.index for event in events_of(parser, list(text))} == {3}


def test_without_tools_calls_are_text_but_harmony_is_understood() -> None:
    parser = make_parser(Formats("hermes", "qwen3"), [])
    assert joined(events_of(parser, [HERMES])) == [("text", HERMES)]

    shape = HARMONY_SHAPES[0]
    assert joined(events_of(make_parser(Formats(None, "harmony"), []), shape.text)) == shape.said
    both = make_parser(Formats("harmony", "harmony"), TOOLS)
    assert joined(events_of(both, shape.text)) == shape.said


@pytest.mark.parametrize("formats", [Formats("nope"), Formats(None, "nope")])
def test_unknown_formats_are_refused_with_those_that_are_known(formats: Formats) -> None:
    with pytest.raises(InvalidRequestError, match=r"'nope'; known: deepseek_.*qwen3"):
        make_parser(formats, [])
    with pytest.raises(InvalidRequestError, match="'nope'"):
        marks_of(formats)


def test_users_can_add_a_format(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shouting(HermesParser):
        def say(self, text: str) -> None:
            super().say(text.upper())

    monkeypatch.setitem(TOOL_PARSERS, "shouting", Shouting)
    assert joined(events_of(make_parser(Formats("shouting"), TOOLS), ["a "])) == [("text", "A ")]


def test_marks_are_those_of_the_stages_in_use() -> None:
    assert marks_of(Formats("mistral", "qwen3")) >= {"[TOOL_CALLS]", "</think>"}
    assert marks_of(Formats("mistral"), has_tools=False) == frozenset()


@pytest.mark.parametrize(
    ("source", "formats"),
    [
        (None, Formats()),
        ("{{ messages }}", Formats()),
        ("<tool_call> {name} </tool_call> <think></think>", Formats("hermes", "qwen3")),
        ("<tool_call><function=f><parameter=p>", Formats("qwen3_coder")),
        ("<tool_call><arg_key> </think>", Formats(None, "qwen3")),
        ("[TOOL_CALLS] [THINK]", Formats("mistral", "mistral")),
        ('<|python_tag|> "parameters"', Formats("llama3_json")),
        ('<|start_header_id|> {"name": x, "parameters": y}', Formats("llama3_json")),
        ('<|python_start|> <|python_end|> "parameters"', Formats("llama4_json")),
        ("<|python_start|> [f(a=1)]", Formats("pythonic")),
        ("as [func_name1(a=b, ...)] <|start_header_id|>", Formats("pythonic")),
        ("List of tools: <|tool_list_start|> <|im_start|>", Formats("lfm2")),
        ("List of tools: [ <|im_start|> </think>", Formats("lfm2", "qwen3")),
        ("<|tool_call_start|>", Formats("lfm2")),
        ("<tool_call> or <tool_calls>", Formats()),
        ("<seed:think> <seed:tool_call> <function=", Formats("seed_oss", "seed_oss")),
        ("<tool_call> <invoke name=f>", Formats()),
        ("<|python_tag|> <function=f>{}</function>", Formats()),
        ("<|start|>assistant<|channel|>", Formats("harmony", "harmony")),
        (
            "<\uff5cAssistant\uff5c> <\uff5ctool\u2581calls\u2581begin\uff5c> </think>",
            Formats("deepseek_v3", "deepseek_r1"),
        ),
    ],
)
def test_formats_are_told_by_a_templates_marks(source: str | None, formats: Formats) -> None:
    assert detect_formats(source) == formats
    make_parser(formats, TOOLS)


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<\uff5cAssistant\uff5c><think>", True),
        ("<|im_start|>assistant\n<think>\nso far", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("[INST]what is <think>?[/INST]", False),
        ("", False),
    ],
)
def test_a_prompt_opens_the_reasoning_if_its_last_turn_does(prompt: str, opens: bool) -> None:
    assert prompt_opens_reasoning(prompt) is opens


def test_a_named_tools_call_is_all_of_the_text_if_any() -> None:
    for pieces in ([PARIS], list(PARIS)):
        said = joined(events_of(NamedToolParser("now"), pieces))
        assert said == [("call", "now", PARIS)]
    parser = NamedToolParser("now", 2, lambda: "id")
    assert parser.feed("") == []
    assert parser.feed("{") == [ToolBegin(0, "id", "now", 2), ToolArguments(0, "{", 2)]
    assert parser.feed("}") == [ToolArguments(0, "}", 2)]
    assert parser.finish() == []

    assert joined(events_of(NamedToolParser("now"), [])) == [("call", "now", "")]


@settings(PROPERTY, max_examples=examples(60))
@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
            st.sampled_from(["arguments", "parameters"]),
            st.dictionaries(
                st.text(),
                st.recursive(
                    st.none() | st.booleans() | st.integers() | st.text(),
                    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
                    max_leaves=5,
                ),
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
    st.sampled_from([None, 1]),
)
def test_required_calls_are_what_a_json_parser_reads(
    calls: list[tuple[str, str, dict[str, object]]], is_ascii: bool, indent: int | None
) -> None:
    text = json.dumps(
        [{"name": n, key: a} for n, key, a in calls], ensure_ascii=is_ascii, indent=indent
    )
    for pieces in ([text], list(text)):
        said = joined(events_of(RequiredToolsParser(TOOLS), pieces))
        assert [(name, json.loads(a)) for _, name, a in said] == [(n, a) for n, _, a in calls]


def test_of_an_array_that_was_cut_only_calls_are_shown() -> None:
    for text in ("{}", ' [{"nam', "[]", "Hello "):
        assert events_of(RequiredToolsParser(), list(text)) == []
    cut = '[{"name": "now", "parameters": {"a": 1}}, {"name": "no'
    assert joined(events_of(RequiredToolsParser(TOOLS), list(cut))) == [("call", "now", '{"a": 1}')]


def test_forced_calls_follow_the_reasoning() -> None:
    formats = Formats("hermes", "qwen3")
    parser = wrap_in_reasoning(formats, NamedToolParser("now"), in_reasoning=True)
    assert joined(events_of(parser, ["hm</think>\n\n{}"])) == [
        ("reasoning", "hm"),
        ("call", "now", "{}"),
    ]


def test_special_texts_are_dropped_the_longest_first_and_marks_are_still_read() -> None:
    text = "<|a|>x<|a|>|><|b<|python_tag|>{}<|a|"
    for pieces in ([text], list(text)):
        stage = SpecialTextFilter(PlainTextParser(), ["<|a|>", "<|a|>|>"])
        assert joined(events_of(stage, pieces)) == [("text", "x<|b<|python_tag|>{}<|a|")]

    stage = SpecialTextFilter(parser_of("mistral"), ["</s>", "[INST]"])
    said = joined(events_of(stage, "[TOOL_[INST]CALLS]now{}</s>"))
    assert said == [("call", "now", "{}")]


@PROPERTY
@given(st.text(alphabet="<|ab>"), st.sets(st.text(alphabet="<|ab>", min_size=1), max_size=4))
def test_what_the_filter_drops_does_not_depend_on_the_split(text: str, dropped: set[str]) -> None:
    whole = joined(events_of(SpecialTextFilter(PlainTextParser(), dropped), [text]))
    assert joined(events_of(SpecialTextFilter(PlainTextParser(), dropped), text)) == whole
    longest_first = "|".join(re.escape(d) for d in sorted(dropped, key=len, reverse=True))
    expected = re.sub(longest_first, "", text) if dropped else text
    assert whole == ([("text", expected)] if expected else [])


def test_plain_text_passes_in_the_pieces_it_comes_in() -> None:
    parser = parser_of("hermes", "qwen3")
    assert parser.feed("Hi") == [Text("Hi")]
    assert parser.feed("") == []
    thinking = parser_of("hermes", "qwen3", in_reasoning=True)
    assert [thinking.feed("a"), thinking.feed(" b")] == [[Reasoning("a")], [Reasoning(" b")]]


def test_a_value_that_holds_its_own_end_leaves_the_arguments_whole() -> None:
    text = (
        "<tool_call>\n<function=search>\n<parameter=query>\n<a></parameter> more\n</parameter>\n"
        "<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>"
    )
    ((_, name, arguments),) = joined(events_of(parser_of("qwen3_coder"), list(text)))
    assert (name, json.loads(arguments)) == ("search", {"query": "<a>", "n": "5"})


def test_seed_oss_has_tags_of_its_own() -> None:
    text = (
        "<seed:think>hm</seed:think>So.\n<seed:tool_call>\n<function=search>\n<parameter=query>"
        "a</parameter>\n</function>\n</seed:tool_call>"
    )
    for pieces in ([text], list(text)):
        assert joined(events_of(parser_of("seed_oss", "seed_oss"), pieces)) == [
            ("reasoning", "hm"),
            ("text", "So."),
            ("call", "search", '{"query": "a"}'),
        ]
    assert prompt_opens_reasoning("<seed:bos>assistant\n<seed:think>\n")
