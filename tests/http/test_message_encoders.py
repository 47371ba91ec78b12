"""Encoders of /v1/messages, and a call's arguments whole and in pieces."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from nanocore.client.chat.events import (
    ChatEvent,
    Finished,
    Reasoning,
    Started,
    Text,
    ToolArguments,
    ToolBegin,
    Usage,
)
from nanocore.http.dialects.message_encoders import (
    MessageEncoder,
    MessageStreamEncoder,
    StreamedInput,
    tool_input,
)
from nanocore.http.http_errors import HttpError

OF_MODEL = "msg_1", "m"
START = Started("r", [1, 2, 3], 2)
USAGE = Usage(3, 2, 5, 4)
END = Finished("stop", USAGE)
TEXTS = ["a", 'quote " back \\ slash', "line\nbreak \x00\x1f\x7f", "\u00e9\u4e1c\U0001f600\u2028"]
TURN: list[ChatEvent] = [
    Reasoning("so"), Reasoning(" it is"), Text("I "), Text("call"), ToolBegin(0, "c0", "f"),
    ToolArguments(0, '{"a"'), ToolArguments(0, ": 1.0}"), ToolBegin(1, "c1", "g"),
    ToolArguments(1, "[5"), ToolArguments(1, "]"), Text("\n"), ToolBegin(2, "c2", "h"),
    ToolArguments(2, "{}"), Finished("tool_calls", USAGE),
]  # fmt: skip
CONTENT = [
    {"type": "thinking", "thinking": "so it is", "signature": "nanocore"},
    {"type": "text", "text": "I call"},
    {"type": "tool_use", "id": "c0", "name": "f", "input": {"a": 1.0}},
    {"type": "tool_use", "id": "c1", "name": "g", "input": {"INVALID_JSON": "[5]"}},
    {"type": "text", "text": "\n"},
    {"type": "tool_use", "id": "c2", "name": "h", "input": {}},
]


def stream(*reads: list[ChatEvent]) -> bytes:
    encoder = MessageStreamEncoder(*OF_MODEL)
    body = b"".join(encoder.feed(0, read, 0) for read in reads)
    return body + encoder.finish()


def events(body: bytes) -> list[Any]:
    """Those of a stream; each has its name as its type, too."""
    found = []
    for one in body.decode().split("\n\n")[:-1]:
        name, data = one.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        found.append(value)
    return found


def put_together(body: bytes) -> Any:
    """The message that a stream makes, by the rules of its documentation."""
    message: Any = None
    inputs: dict[int, str] = {}
    opened = -1
    is_open = False
    for event in events(body):
        kind = event["type"]
        if kind == "message_start":
            assert message is None
            message = event["message"]
        elif kind == "content_block_start":
            assert not is_open, "one block at a time"
            opened, is_open = opened + 1, True
            assert event["index"] == opened == len(message["content"])
            message["content"].append(event["content_block"])
        elif kind == "content_block_delta":
            assert is_open
            assert event["index"] == opened
            block, delta = message["content"][opened], event["delta"]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            elif delta["type"] == "thinking_delta":
                block["thinking"] += delta["thinking"]
            elif delta["type"] == "signature_delta":
                block["signature"] = delta["signature"]
            else:
                assert delta["type"] == "input_json_delta"
                inputs[opened] = inputs.get(opened, "") + delta["partial_json"]
        elif kind == "content_block_stop":
            assert is_open
            assert event["index"] == opened
            is_open = False
            if opened in inputs:
                message["content"][opened]["input"] = json.loads(inputs[opened])
        elif kind == "message_delta":
            assert not is_open
            message |= event["delta"] | {"usage": event["usage"]}
        else:
            assert kind in ("ping", "message_stop")
    assert events(body)[-1] == {"type": "message_stop"}
    return message


def whole(*reads: list[ChatEvent]) -> Any:
    encoder = MessageEncoder(*OF_MODEL)
    assert b"".join(encoder.feed(0, read, 0) for read in reads) == b""
    return json.loads(encoder.finish())


def test_a_stream_of_texts_is_the_text() -> None:
    body = stream([START], *[[Text(text)] for text in TEXTS], [END])
    kinds = [event["type"] for event in events(body)]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[3:-3] == ["content_block_delta"] * len(TEXTS)
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    deltas = [event["delta"] for event in events(body)[3:-3]]
    assert deltas == [{"type": "text_delta", "text": text} for text in TEXTS]


def test_a_message_says_what_it_took() -> None:
    message = whole([START, Text("hi"), END])
    assert message == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "hi"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 1,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 5,
            "output_tokens_details": {"thinking_tokens": 4},
        },
    }


def test_a_stream_begins_with_the_prompts_tokens_and_no_end() -> None:
    first = events(stream([START], [END]))[0]["message"]
    assert (first["content"], first["stop_reason"]) == ([], None)
    assert first["usage"] == {
        "input_tokens": 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 0,
    }


@pytest.mark.parametrize("size", [1, 2, 3, len(TURN)])
def test_blocks_are_in_the_order_in_which_the_model_wrote_them(size: int) -> None:
    reads = [[START], *[TURN[i : i + size] for i in range(0, len(TURN), size)]]
    message = whole(*reads)
    assert message["content"] == CONTENT
    assert put_together(stream(*reads)) == message


def test_a_call_without_arguments_before_its_end_is_an_empty_object() -> None:
    reads: list[list[ChatEvent]] = [[START], [ToolBegin(0, "c", "f")], [Finished("length", USAGE)]]
    message = whole(*reads)
    assert message["content"] == [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]
    assert put_together(stream(*reads)) == message


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        (Finished("stop", USAGE), "end_turn", None),
        (Finished("stop", USAGE, 7), "end_turn", None),  # a stop token
        (Finished("length", USAGE), "max_tokens", None),
        (Finished("stop", USAGE, "\n\n"), "stop_sequence", "\n\n"),
        (Finished("tool_calls", USAGE), "tool_use", None),
    ],
)
def test_a_message_says_why_it_ended(end: Finished, reason: str, sequence: str | None) -> None:
    reads: list[list[ChatEvent]] = [[START, Text("a")], [end]]
    message = whole(*reads)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert put_together(stream(*reads)) == message


def test_an_answer_without_a_word_has_no_blocks() -> None:
    assert whole([START], [END])["content"] == []
    assert put_together(stream([START], [END]))["content"] == []


def test_a_stream_that_fails_ends_with_an_event_and_not_with_a_message() -> None:
    encoder = MessageStreamEncoder(*OF_MODEL)
    body = encoder.feed(0, [START, Text("a")], 1)
    body += encoder.feed(0, [Finished("abort", USAGE, message="gone")], 1)
    body += encoder.fail(HttpError(503, "gone"))
    *before, last = events(body)
    assert last == {"type": "error", "error": {"type": "overloaded_error", "message": "gone"}}
    assert "message_delta" not in [event["type"] for event in before]


def test_a_stream_that_is_quiet_pings() -> None:
    assert events(MessageStreamEncoder(*OF_MODEL).keep_alive) == [{"type": "ping"}]


OBJECTS = [
    "{}",
    '{"a": 1}',
    ' \n{"a": "\u00e9}", "b": [1.0, 123456789012345678901234567890]}\n',
    '{"a": {"b": "\\u00e9\\n"}}',
]
OTHERS = ["[1]", "null", '"{}"', "5", "echo hi", "\u00e9", ' "', "]"]


def whole_input(arguments: str) -> str:
    return msgspec.json.encode(tool_input(arguments)).decode()


def streamed_input(*deltas: str) -> str:
    stream = StreamedInput()
    return "".join([*(stream.feed(delta) for delta in deltas), stream.finish()])


@pytest.mark.parametrize("arguments", OBJECTS)
def test_an_object_is_as_the_model_wrote_it(arguments: str) -> None:
    assert whole_input(arguments) == arguments.strip()
    assert streamed_input(arguments) == streamed_input(*arguments) == arguments


@pytest.mark.parametrize("arguments", OTHERS)
def test_what_is_no_object_is_put_into_one(arguments: str) -> None:
    wanted = {"INVALID_JSON": arguments}
    assert json.loads(whole_input(arguments)) == wanted
    assert json.loads(streamed_input(arguments)) == json.loads(streamed_input(*arguments)) == wanted


@pytest.mark.parametrize("arguments", ['{"a": ', '{"a" 1}', '{"a": NaN}', "[" * 100_000])
def test_what_is_no_json_is_put_into_an_object_when_all_of_it_is_there(arguments: str) -> None:
    assert json.loads(whole_input(arguments)) == {"INVALID_JSON": arguments}


def test_an_object_is_shown_from_its_beginning_up_to_where_it_is_cut() -> None:
    assert streamed_input('{"a"', ": ") == '{"a": '

    stream = StreamedInput()
    assert [stream.feed(delta) for delta in (" ", "\n", '{"', "a")] == ["", "", ' \n{"', "a"]


@pytest.mark.parametrize("arguments", ["", " ", "\n\t"])
def test_no_arguments_are_an_empty_object(arguments: str) -> None:
    assert whole_input(arguments) == "{}"
    assert streamed_input(arguments) == ""  # clients take that for one
