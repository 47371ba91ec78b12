"""Events to chunks and answers of chat completions, as their clients put them together."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nanocore.client.chat.events import (
    ChatEvent,
    Finished,
    Logprobs,
    Reasoning,
    Started,
    Text,
    ToolArguments,
    ToolBegin,
    Usage,
)
from nanocore.client.requests.request_outputs import Logprob
from nanocore.http.dialects.chat_completions import (
    ChatCompletionEncoder,
    ChatStreamEncoder,
    ChatStyle,
)
from nanocore.http.dialects.request_fields import ResponseId, StreamOptions
from nanocore.http.http_errors import HttpError

START = Started("r", [1, 2, 3], 2, seed=7)
END = Finished("stop", Usage(3, 2, 5, 1))


def style(**changes: Any) -> ChatStyle:
    fields: dict[str, Any] = {
        "head": ResponseId("", "c").head("chat.completion", "m", "f"), "num_samples": 1,
        "num_top_logprobs": 1, "logprobs_as_token_ids": False, "shows_reasoning": True, "echo": "",
    }  # fmt: skip
    return ChatStyle(**fields | changes)


def chunks(body: bytes) -> list[Any]:
    """The events of a stream; its end is None."""
    found = []
    for event in body.decode().split("\n\n")[:-1]:
        data = event.removeprefix("data: ")
        assert data != event
        found.append(None if data == "[DONE]" else json.loads(data))
    return found


def streamed(
    *reads: list[ChatEvent], usage: bool = False, always: bool = False, **changes: Any
) -> list[Any]:
    encoder = ChatStreamEncoder(style(**changes), StreamOptions(usage, always))
    body = b"".join(encoder.feed(0, read, i + 1) for i, read in enumerate(reads))
    return chunks(body + encoder.finish())


def whole(*reads: list[ChatEvent], **changes: Any) -> Any:
    encoder = ChatCompletionEncoder(style(**changes))
    assert b"".join(encoder.feed(0, read, 0) for read in reads) == b""
    return json.loads(encoder.finish())


TEXTS = ["a", 'quote " back \\ slash', "line\nbreak \x00\x1f\x7f", "\u00e9\u4e1c\U0001f600\u2028"]


def test_a_stream_of_texts_is_the_text() -> None:
    found = streamed([START], *[[Text(text)] for text in TEXTS], [END])
    first, *middle, last, done = found
    assert done is None
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["seed"] == 7
    assert [chunk["choices"][0]["delta"]["content"] for chunk in middle] == TEXTS
    assert last["choices"] == [
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    for chunk in (first, *middle, last):
        assert (chunk["id"], chunk["object"]) == ("c", "chat.completion.chunk")
        assert (chunk["model"], chunk["system_fingerprint"]) == ("m", "f")


def test_texts_around_calls_are_lines_of_their_own() -> None:
    calls = [(ToolBegin(i, f"c{i}", "f"), ToolArguments(i, "{}")) for i in range(3)]
    said: list[ChatEvent] = [
        *calls[0], Text("start"), Text("!"), *calls[1], Text("middle"), *calls[2], Text("end"),
    ]  # fmt: skip
    content = "start!\nmiddle\nend"
    assert whole([START, *said, END])["choices"][0]["message"]["content"] == content
    for reads in ([[event] for event in said], [said]):
        found = streamed([START], *reads, [END])
        deltas = [chunk["choices"][0]["delta"] for chunk in found[:-1] if chunk["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == content


def test_a_text_is_the_same_alone_or_beside_other_events() -> None:
    (_, alone, _, _) = streamed([START], [Text("x")], [END])
    (_, beside, _, _) = streamed([START, Text("x"), END])
    assert alone == beside


def test_samples_keep_their_indices() -> None:
    found = streamed(
        [START],
        [Text("a", 1)],
        [Text("b", 0), Text("c", 1)],
        [END, Finished("length", END.usage, index=1)],
        num_samples=2,
    )
    said = [
        (choice["index"], choice["delta"].get("content"), choice["finish_reason"])
        for chunk in found[:-1]
        for choice in chunk["choices"]
    ]
    assert said == [
        (0, "", None), (1, "", None), (1, "a", None), (0, "b", None), (1, "c", None),
        (0, None, "stop"), (1, None, "length"),
    ]  # fmt: skip


USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 5,
    "total_tokens": 8,
    "prompt_tokens_details": {"cached_tokens": 2},
    "completion_tokens_details": {"reasoning_tokens": 1},
}


def test_usage_is_a_chunk_of_its_own_or_goes_with_every_chunk() -> None:
    found = streamed([START], [Text("a")], [END], usage=True)
    assert (found[-2]["choices"], found[-2]["usage"]) == ([], USAGE)
    assert [chunk["usage"] for chunk in found[:-2]] == [None] * 3
    assert all("usage" not in chunk for chunk in streamed([START], [END])[:-1])

    found = streamed([START], [Text("a")], [END], always=True)
    assert [chunk["usage"]["completion_tokens"] for chunk in found[:-1]] == [1, 2, 3]


def test_calls_come_as_a_beginning_and_pieces_of_arguments() -> None:
    events: list[ChatEvent] = [
        ToolBegin(0, "id0", "f"), ToolArguments(0, '{"a":'), ToolArguments(0, "1}"),
        ToolBegin(1, "id1", "g"), ToolArguments(1, "{}"),
    ]  # fmt: skip
    found = streamed([START], events, [Finished("tool_calls", END.usage)])
    calls = [chunk["choices"][0]["delta"]["tool_calls"][0] for chunk in found[1:-2]]
    assert calls[0] == {
        "index": 0, "id": "id0", "type": "function", "function": {"name": "f", "arguments": ""},
    }  # fmt: skip
    assert [call["function"]["arguments"] for call in calls] == ["", '{"a":', "1}", "", "{}"]
    assert [call["index"] for call in calls] == [0, 0, 0, 1, 1]
    assert found[-2]["choices"][0]["finish_reason"] == "tool_calls"
    message = whole([START], events, [END])["choices"][0]["message"]
    assert message["content"] is None
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "f", "arguments": '{"a":1}'},
        {"name": "g", "arguments": "{}"},
    ]


@pytest.mark.parametrize("shows", [True, False])
def test_reasoning_is_shown_by_both_its_names_or_not_at_all(shows: bool) -> None:
    events: list[ChatEvent] = [Reasoning("hm"), Text("a")]
    found = streamed([START], events, [END], shows_reasoning=shows)
    deltas = [chunk["choices"][0]["delta"] for chunk in found[1:-2]]
    thoughts = [{"reasoning": "hm", "reasoning_content": "hm"}] if shows else []
    assert deltas == [*thoughts, {"content": "a"}]
    message = whole([START], events, [END], shows_reasoning=shows)["choices"][0]["message"]
    assert message.get("reasoning") == message.get("reasoning_content") == ("hm" if shows else None)


class _Tokenizer:
    def token_text(self, token_id: int) -> Any:
        class Shown:
            text, bytes = f"t{token_id}", b"\xe2"

        return Shown


def logprob(token_id: int, value: float, rank: int) -> Logprob:
    return Logprob(value, rank, token_id, _Tokenizer())  # type: ignore[arg-type]


def test_logprobs_go_with_the_text_that_their_tokens_bring() -> None:
    own = {5: logprob(5, -2.0, 3), 6: logprob(6, -0.5, 1), 7: logprob(7, -1.0, 2)}
    lowest = {8: logprob(8, float("-inf"), 9)}
    found = streamed([START], [Text("a"), Logprobs([own])], [Logprobs([lowest])], [END])
    entry = {
        "token": "t5", "logprob": -2.0, "bytes": [226],
        "top_logprobs": [{"token": "t6", "logprob": -0.5, "bytes": [226]}],
    }  # fmt: skip
    choices = [chunk["choices"][0] for chunk in found[1:-2]]
    assert choices[0]["delta"] == {"content": "a"}
    assert choices[0]["logprobs"] == {"content": [entry]}
    assert choices[1]["delta"] == {}
    assert choices[1]["logprobs"]["content"][0]["logprob"] == -9999.0
    answer = whole([START], [Text("a"), Logprobs([own])], [END], logprobs_as_token_ids=True)
    (named,) = answer["choices"][0]["logprobs"]["content"]
    assert (named["token"], named["top_logprobs"][0]["token"]) == ("token_id:5", "token_id:6")


def test_logprobs_before_a_text_of_the_same_read_are_not_lost() -> None:
    one = {5: logprob(5, -2.0, 3)}
    for events in ([START, Logprobs([one])], [START, Text("a"), Logprobs([one]), END]):
        found = streamed(events)
        entries = [
            entry
            for chunk in found[:-1]
            for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", [])
        ]
        assert [entry["token"] for entry in entries] == ["t5"]


def test_an_answer_is_one_object() -> None:
    answer = whole([START], [Text("a")], [Text("b"), END])
    assert answer["object"] == "chat.completion"
    assert answer["usage"] == USAGE
    assert answer["seed"] == 7
    (choice,) = answer["choices"]
    assert choice["message"] | {"content": "ab", "role": "assistant"} == choice["message"]
    assert (choice["finish_reason"], choice["index"]) == ("stop", 0)


def test_an_echoed_text_goes_before_each_sample() -> None:
    assert streamed([START], [END], echo="pre")[0]["choices"][0]["delta"]["content"] == "pre"
    assert (
        whole([START], [Text("a")], [END], echo="pre")["choices"][0]["message"]["content"] == "prea"
    )


def test_a_stream_that_fails_ends_with_an_error_and_nothing_more() -> None:
    encoder = ChatStreamEncoder(style(), StreamOptions(True, False))
    (error,) = chunks(encoder.fail(HttpError(503, "gone", "unavailable")))
    assert error["error"] == {
        "message": "gone", "type": "server_error", "param": None, "code": "unavailable",
    }  # fmt: skip


@pytest.mark.parametrize("character", "\u0085\u2028\u2029")
def test_no_character_of_a_text_ends_a_line(character: str) -> None:
    """httpx, and all who use Python's splitlines, would cut the event there."""
    encoder = ChatStreamEncoder(style(echo=character), StreamOptions(False, False))
    events: list[ChatEvent] = [START, Text(character), Reasoning(character), END]
    body = b"".join(encoder.feed(0, [event], 1) for event in events)
    body += encoder.fail(HttpError(500, character))
    lines = body.decode().splitlines()
    assert all(line.startswith("data: ") for line in lines[::2])
    assert not any(lines[1::2])
    deltas = [json.loads(line[6:]).get("choices", [{}])[0].get("delta", {}) for line in lines[::2]]
    assert [delta.get("content") for delta in deltas[:2]] == [character] * 2
