"""Conversations as clients send them: adapted to what a template takes, found out by rendering."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from nanocore.client.chat.template_dialect import TemplateDialect
from nanocore.protocol.errors import InvalidRequestError

CALL = {"id": "call12345", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}


def python_template(messages: list[dict[str, Any]], **takes: bool) -> str:
    lines = []
    for message in messages:
        content = message.get("content")
        if message["role"] == "developer" and not takes.get("developer"):
            raise InvalidRequestError("unknown role")
        if content is None and takes.get("content"):
            raise InvalidRequestError("no content")
        if isinstance(content, list):
            content = "".join(p["text"] for p in content) if takes.get("parts") else str(content)
        for call in message.get("tool_calls", []):
            arguments = call["function"]["arguments"]
            if takes.get("objects"):
                arguments = json.dumps(arguments)
            elif not isinstance(arguments, str):
                raise InvalidRequestError("can only concatenate str")
            content = f"{content or ''}{arguments}"
        lines.append(f"{message['role']}: {content}")
    return "\n".join(lines)


def adapted(message: dict[str, Any], **takes: bool) -> dict[str, Any]:
    dialect = TemplateDialect(lambda messages: python_template(messages, **takes))
    before = json.dumps(message)
    (turn,) = dialect.adapt([message])
    assert json.dumps(message) == before
    return turn


def test_text_in_parts_is_joined_where_parts_are_unknown() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c", "x": 1}]
    message = {"role": "user", "content": parts}
    assert adapted(message)["content"] == "a\nb\nc"
    kept = [{"type": "text", "text": text} for text in "abc"]
    assert adapted(message, parts=True)["content"] == kept


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, 5, {"text": "a"}]
)
def test_a_part_that_is_no_text_is_refused_by_place(part: Any) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, part]}
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.content\[1\] must be"):
        adapted(message)


def test_a_developer_is_the_system_to_templates_that_know_none() -> None:
    message = {"role": "developer", "content": "x"}

    def knowing(messages: list[dict[str, Any]]) -> str:
        return "\n".join(
            f"<{m['role']}>{m['content']}" for m in messages if m["role"] in ("developer", "user")
        )

    assert adapted(message)["role"] == "system"
    assert adapted(message, developer=True)["role"] == "system", "it prints whatever role there is"
    assert TemplateDialect(knowing).adapt([message]) == [message]


@pytest.mark.parametrize("arguments", ['{"a": "é"}', {"a": "é"}])
def test_arguments_are_given_in_the_form_that_the_template_takes(arguments: Any) -> None:
    call = CALL | {"function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    as_text = adapted(message)["tool_calls"][0]["function"]["arguments"]
    assert as_text == '{"a": "é"}'
    as_object = adapted(message, objects=True)["tool_calls"][0]["function"]["arguments"]
    assert as_object == {"a": "é"}


@pytest.mark.parametrize("arguments", ['{"a": ', "5", "[1]"])
def test_arguments_that_are_no_object_stay_as_the_model_wrote_them(arguments: str) -> None:
    call = CALL | {"function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "tool_calls": [call]}
    turn = adapted(message, objects=True)
    assert turn["tool_calls"][0]["function"]["arguments"] == arguments


def test_objects_may_be_written_in_a_form_of_the_models_own() -> None:
    def render(messages: list[dict[str, Any]]) -> str:
        calls = [call for message in messages for call in message.get("tool_calls", [])]
        arguments = calls[0]["function"]["arguments"]
        if isinstance(arguments, str):
            return arguments
        return "{" + ", ".join(f"{name}:{value}" for name, value in arguments.items()) + "}"

    (turn,) = TemplateDialect(render).adapt([{"role": "assistant", "tool_calls": [CALL]}])
    assert turn["tool_calls"][0]["function"]["arguments"] == {"a": "é"}


def test_arguments_that_are_missing_are_none() -> None:
    call = CALL | {"function": {"name": "f", "arguments": ""}}
    turn = adapted({"role": "assistant", "tool_calls": [call]}, objects=True)
    assert turn["tool_calls"][0]["function"]["arguments"] == {}

    for lacking in ({}, {"arguments": None}):
        call = {"function": {"name": "f", **lacking}}
        turn = adapted({"role": "assistant", "tool_calls": [call]}, objects=True)
        assert turn["tool_calls"][0]["function"]["arguments"] == {}


def test_a_calling_turn_gets_content_only_where_it_must() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert adapted(message)["content"] is None
    assert adapted(message, content=True)["content"] == ""


def plain_template(messages: list[dict[str, Any]], tools: Any = None) -> str:
    if not all(isinstance(message.get("content"), str) for message in messages):
        raise InvalidRequestError("content is added to a text")
    return "\n".join(f"{message['role']}: " + message["content"] for message in messages)


@pytest.mark.parametrize(
    ("calls", "place"),
    [
        ({"function": {"name": "f"}}, ""),
        ("f", ""),
        ([CALL, "f"], "[1]"),
        ([CALL, {}], "[1]"),
        ([{"function": "f"}], "[0]"),
        ([{"function": {}}], "[0].function.name"),
        ([{"function": {"name": 1}}], "[0].function.name"),
        ([{"function": {"name": ""}}], "[0].function.name"),
        ([{"function": {"name": "f", "arguments": [1]}}], "[0].function.arguments"),
    ],
)
@pytest.mark.parametrize("source", ["", "{{ tools }}"])
def test_what_is_no_call_is_refused_by_its_place(calls: Any, place: str, source: str) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": calls}]
    with pytest.raises(InvalidRequestError) as refused:
        TemplateDialect(plain_template, source).adapt(turns)
    assert refused.value.param == f"messages[1].tool_calls{place}"
    assert str(refused.value).startswith(f"{refused.value.param} is ")


def test_a_template_that_leaves_tools_out_is_left_alone() -> None:
    dialect = TemplateDialect(plain_template, "{# no tools #}")
    assert dialect.omits_tools
    assert dialect.mentions_tools
    (turn,) = dialect.adapt([{"role": "assistant", "tool_calls": [CALL]}])
    assert (turn["content"], len(turn["tool_calls"])) == ("", 1)


@pytest.mark.parametrize("content", [1, {"text": "a"}, True])
def test_content_of_another_type_is_refused_by_place(content: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.content is a text or a list"):
        adapted({"role": "user", "content": content})


def test_empty_lists_of_calls_are_left_out() -> None:
    assert adapted({"role": "assistant", "content": "x", "tool_calls": []}) == {
        "role": "assistant",
        "content": "x",
    }
    assert "tool_calls" not in adapted({"role": "assistant", "content": "x", "tool_calls": None})


@pytest.mark.parametrize("messages", ["hi", {"role": "user"}, 5, None, [5], ["hi"]])
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"a list of messages|is a dict with a role"):
        TemplateDialect(python_template).adapt(messages)


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("roles", "wanted"),
    [
        ("su", [("system", "0"), ("user", "1")]),
        ("ssu", [("system", "0"), ("system", "1"), ("user", "2")]),
        ("us", [("user", "0\n\n1")]),
        ("sus", [("system", "0"), ("user", "1\n\n2")]),
        ("usu", [("user", "0\n\n1\n\n2")]),
        ("uasu", [("user", "0"), ("assistant", "1"), ("user", "2\n\n3")]),
        ("uas", [("user", "0"), ("assistant", "1"), ("user", "2")]),
        ("uus", [("user", "0"), ("user", "1\n\n2")]),
        ("ussa", [("user", "0\n\n1\n\n2"), ("assistant", "3")]),
    ],
)
def test_a_system_that_speaks_late_is_the_user_to_templates_that_know_none(
    roles: str, wanted: list[tuple[str, str]]
) -> None:
    def strict(messages: list[dict[str, Any]]) -> str:
        if any(message["role"] == "system" for message in messages[1:]):
            raise InvalidRequestError("the system message comes first")
        return python_template(messages)

    names = {"s": "system", "u": "user", "a": "assistant"}
    messages = [said(names[role], str(i)) for i, role in enumerate(roles)]
    adapted_turns = TemplateDialect(strict).adapt(messages)
    assert [(turn["role"], turn["content"]) for turn in adapted_turns] == wanted
    assert TemplateDialect(python_template).adapt(messages) == messages


def test_a_late_system_in_parts_joins_text_as_a_part() -> None:
    def strict(messages: list[dict[str, Any]]) -> str:
        if any(message["role"] == "system" for message in messages[1:]):
            raise InvalidRequestError("the system message comes first")
        return python_template(messages, parts=True)

    part = {"type": "text", "text": "late"}
    (turn,) = TemplateDialect(strict).adapt([said("user", "hi"), said("system", [part])])
    assert turn == said("user", [{"type": "text", "text": "hi"}, part])


def test_a_template_is_asked_once_and_only_for_what_is_there() -> None:
    rendered: list[Any] = []

    def render(messages: list[dict[str, Any]]) -> str:
        rendered.append(messages)
        return python_template(messages, objects=True)

    dialect = TemplateDialect(render)
    plain = [{"role": "user", "content": str(datetime(2026, 1, 1))}]
    assert dialect.adapt(plain) == plain
    assert rendered == []
    for _ in range(3):
        dialect.adapt([{"role": "assistant", "tool_calls": [CALL]}])
    assert len(rendered) == 1
