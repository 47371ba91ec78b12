"""Anthropic's messages of blocks, as the chat messages that templates get."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nanocore.http.dialects.anthropic_messages import (
    CountTokensRequest,
    chat_messages,
    is_prefilled,
)
from nanocore.http.http_errors import HttpError

HI = {"role": "user", "content": "hi"}
CALL = {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}
BILLING = "x-anthropic-billing-header: cc_version=1; cch=12345;"


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}


def read(messages: Any, system: Any = None) -> CountTokensRequest:
    return msgspec.convert({"messages": messages, "system": system}, CountTokensRequest)


def chat(*messages: Any, system: Any = None) -> list[Any]:
    request = read(messages, system)
    return [*chat_messages(request.system, request.messages)]


def test_texts_are_texts_however_they_are_sent_and_empty_where_there_is_none() -> None:
    for lacking in ({}, {"content": None}):
        turns = [{"role": role, **lacking} for role in ("user", "assistant", "user")]
        assert [turn["content"] for turn in chat(*turns)] == ["", "", ""]
        assert is_prefilled(read(turns[:2]).messages)

    assert chat(HI) == chat({"role": "user", "content": [text("hi")]}) == [HI]
    assert chat({"role": "user", "content": [text("a"), text("b")]})[0]["content"] == "a\nb"
    assert chat({"role": "user", "content": []}) == [{"role": "user", "content": ""}]

    assert "content" not in chat(HI, {"role": "assistant", "content": [CALL]}, HI)[1]


def test_what_was_said_after_a_call_begins_a_line() -> None:
    said = [text("a"), text("b"), CALL, CALL, text("c"), text("d")]
    (turn,) = chat({"role": "assistant", "content": said})
    assert turn["content"] == "ab\ncd"


@pytest.mark.parametrize(
    "system", ["a\nb", [text("a"), text("b")], [text("a"), text(""), text("b")]]
)
def test_the_system_is_one_message_before_all_others(system: Any) -> None:
    assert chat(HI, system=system) == [{"role": "system", "content": "a\nb"}, HI]
    late = {"role": "system", "content": [text("late")]}
    early = {"role": "system", "content": "early"}
    assert chat(early, HI, late, system=system) == [
        {"role": "system", "content": "a\nb\nearly"},
        HI,
        {"role": "system", "content": "late"},
    ]


@pytest.mark.parametrize("system", [None, "", [], [text("")], BILLING, [text(BILLING)]])
def test_no_system_is_no_message(system: Any) -> None:
    assert chat(HI, system=system) == [HI]


@pytest.mark.parametrize("system", [f"{BILLING}\nBe good.", [text(BILLING), text("Be good.")]])
def test_what_changes_with_each_request_is_not_put_before_the_prompt(system: Any) -> None:
    assert chat(HI, system=system)[0] == {"role": "system", "content": "Be good."}


def test_the_users_own_words_are_never_taken_for_that() -> None:
    assert chat({"role": "user", "content": BILLING})[0]["content"] == BILLING
    assert chat(HI, system=f"a\n{BILLING}")[0]["content"] == f"a\n{BILLING}"


def test_a_turn_of_the_assistant_keeps_what_it_thought_and_called() -> None:
    content = [
        {"type": "thinking", "thinking": "so", "signature": "of another server"},
        {"type": "redacted_thinking", "data": "xyz"},
        text("I "),
        text("call"),
        CALL,
    ]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "5"}
    turns = chat(
        HI, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}
    )
    function = {"name": "f", "arguments": {"a": 1}}
    assert turns[1:] == [
        {
            "role": "assistant",
            "content": "I call",
            "reasoning_content": "so",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "5"},
    ]


def test_results_come_before_the_text_that_was_sent_with_them() -> None:
    content = [
        text("and now?"),
        {"type": "tool_result", "tool_use_id": "c1", "content": [text("a"), text("b")]},
        {"type": "tool_result", "tool_use_id": "c2"},
    ]
    assert chat({"role": "user", "content": content}) == [
        {"role": "tool", "tool_call_id": "c1", "content": "a\nb"},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
        {"role": "user", "content": "and now?"},
    ]


@pytest.mark.parametrize(
    ("content", "is_error", "shown"),
    [
        ("no file", True, "Error: no file"),
        ("FileNotFoundError: x", True, "FileNotFoundError: x"),
        ("", True, "Error"),
        ("no file", False, "no file"),
    ],
)
def test_a_result_that_is_an_error_says_so(content: str, is_error: bool, shown: str) -> None:
    result = {
        "type": "tool_result", "tool_use_id": "c", "content": content, "is_error": is_error
    }  # fmt: skip
    assert chat({"role": "user", "content": [result]})[0]["content"] == shown


@pytest.mark.parametrize(
    ("block", "shown"),
    [
        ({"type": "document", "source": {"type": "text", "data": "d"}}, "d"),
        ({"type": "document", "title": "t", "source": {"type": "text", "data": "d"}}, "t\nd"),
        ({"type": "document", "source": {"type": "content", "content": "d"}}, "d"),
        ({"type": "document", "source": {"type": "content", "content": [text("d")]}}, "d"),
        ({"type": "search_result", "title": "t", "source": "s", "content": [text("d")]}, "t\ns\nd"),
        ({"type": "tool_reference", "tool_name": "f"}, "f"),
    ],
)
def test_what_holds_text_is_read(block: dict[str, Any], shown: str) -> None:
    assert chat({"role": "user", "content": [block]})[0]["content"] == shown


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}


@pytest.mark.parametrize(
    ("block", "word"),
    [
        (IMAGE, "reads text only"),
        ({"type": "document", "source": {"type": "base64", "data": "x"}}, "reads text only"),
        ({"type": "document"}, "reads text only"),
        ({"type": "server_tool_use", "id": "x"}, "are supported"),
        (CALL, "not allowed here"),
        ({"type": "thinking", "thinking": "x"}, "not allowed here"),
        ({"type": "text"}, "has no text"),
        ({"type": "tool_result", "content": "x"}, "has no tool_use_id"),
        ({"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}, "reads text only"),
    ],
)
def test_what_is_not_served_is_refused_by_place(block: dict[str, Any], word: str) -> None:
    with pytest.raises(HttpError, match=word) as raised:
        chat(HI, {"role": "user", "content": [text("a"), block]})
    assert raised.value.status == 400
    assert raised.value.message.startswith("messages[1].content[1]")


@pytest.mark.parametrize("kind", ["search_result", "document"])
def test_texts_with_titles_hold_nothing_but_text(kind: str) -> None:
    inner: Any = {"type": kind, "content": [text("a")], "source": {"type": "content"}}
    source = {"type": "content", "content": [inner]}
    outer = {"type": kind, "content": [inner], "source": source if kind == "document" else "s"}
    with pytest.raises(HttpError, match="only text is allowed here"):
        chat({"role": "user", "content": [outer]})


@pytest.mark.parametrize(
    "block", [{"type": "tool_use", "name": "f"}, {"type": "tool_use", "id": "c"}]
)
def test_a_call_has_an_id_and_a_name(block: dict[str, Any]) -> None:
    with pytest.raises(HttpError, match=r"has no (id|name)"):
        chat({"role": "assistant", "content": [block]})


def test_a_conversation_has_messages() -> None:
    with pytest.raises(HttpError, match="messages is empty"):
        chat(system="x")


def test_an_answer_goes_on_where_the_assistants_last_message_ends() -> None:
    assert is_prefilled(read([HI, {"role": "assistant", "content": "The "}]).messages)
    assert not is_prefilled(read([HI]).messages)
    assert not is_prefilled(read([{"role": "assistant", "content": "a"}, HI]).messages)
    with pytest.raises(HttpError, match="send their tool_result"):
        is_prefilled(read([HI, {"role": "assistant", "content": [CALL]}]).messages)
