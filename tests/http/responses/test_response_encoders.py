"""Events of a chat to a response: every event in its place, valid by OpenAI's own types."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import pytest
from msgspec.structs import replace
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

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
from nanocore.client.tokenizer import Tokenizer
from nanocore.http.dialects.responses.response_encoders import (
    ResponseEncoder,
    ResponseStreamEncoder,
    ResponseStyle,
)
from nanocore.http.dialects.responses.response_items import Item
from nanocore.http.http_errors import HttpError
from tests.http.responses.asked import encoded, sent_events
from tests.tiny_models import write_byte_tokenizer

EVENT: Final[TypeAdapter[ResponseStreamEvent]] = TypeAdapter(ResponseStreamEvent)
STYLE: Final = ResponseStyle(
    key="k",
    created_s=1,
    request_fields={"model": "m", "parallel_tool_calls": True, "tool_choice": "auto", "tools": []},
)
STARTED: Final = Started("r", [1, 2, 3], 2, seed=7)
USAGE: Final = Usage(3, 2, 9, 4)
TURN: Final[list[ChatEvent]] = [
    STARTED,
    Reasoning("so "),
    Reasoning("what"),
    Text("I "),
    Text("call"),
    ToolBegin(0, "call_a", "add"),
    ToolArguments(0, '{"a":'),
    ToolArguments(0, "1}"),
    ToolBegin(1, "call_b", "patch"),
    ToolArguments(1, '{"input": "*** "}'),
    Finished("tool_calls", USAGE),
]
PATCHING: Final = replace(STYLE, custom_tools=frozenset({"patch"}))


def streamed(
    steps: Sequence[Sequence[ChatEvent]],
    style: ResponseStyle = STYLE,
    error: HttpError | None = None,
) -> list[dict[str, Any]]:
    """What a client gets, checked: by OpenAI's types, by numbers, and by what the deltas make."""
    encoder = ResponseStreamEncoder(style, None)
    body = b"".join(encoder.feed(0, step, 1) for step in steps)
    body += encoder.finish() if error is None else encoder.fail(error)
    events = list(sent_events(body))
    for number, event in enumerate(events):
        EVENT.validate_python(event)
        assert event["sequence_number"] == number
    check_deltas(events)
    return events


def check_deltas(events: list[dict[str, Any]]) -> None:
    """Each item's deltas, joined, are what its end says."""
    pieces: dict[str, str] = {}
    for event in events:
        kind = event["type"]
        if kind.endswith(".delta"):
            pieces[event["item_id"]] = pieces.get(event["item_id"], "") + event["delta"]
        elif "item_id" in event and "_part." not in kind:
            whole = next(event[key] for key in ("text", "arguments", "input") if key in event)
            assert pieces.get(event["item_id"], "") == whole


def answered(events: Sequence[ChatEvent], style: ResponseStyle = STYLE) -> dict[str, Any]:
    """The whole response."""
    encoder = ResponseEncoder(style, None)
    assert encoder.feed(0, events, 1) == b""
    response = Response.model_validate_json(encoder.finish(), strict=True)
    return encoded(response.model_dump(mode="json", exclude_unset=True))  # type: ignore[no-any-return]


def kinds(events: Sequence[dict[str, Any]]) -> list[str]:
    """Without what they have in common."""
    return [event["type"].removeprefix("response.") for event in events]


@pytest.mark.parametrize("num_steps", [1, len(TURN)])
def test_each_item_is_added_written_and_done_before_the_next(num_steps: int) -> None:
    steps = [TURN] if num_steps == 1 else [[event] for event in TURN]
    events = streamed(steps, PATCHING)
    assert kinds(events) == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]  # fmt: skip
    tickets = [event["output_index"] for event in events if "output_index" in event]
    assert tickets == sorted(tickets)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert [item["id"] for item in done] == ["rs_k_0", "msg_k_1", "fc_k_2", "ctc_k_3"]
    assert [item["status"] for item in done] == ["completed"] * 4
    assert done[3]["input"] == "*** "


def test_the_whole_response_is_the_one_that_a_stream_ends_with() -> None:
    last = streamed([[event] for event in TURN], PATCHING)[-1]["response"]
    whole = answered(TURN, PATCHING)
    assert last.pop("completed_at") <= whole.pop("completed_at")
    assert whole == last
    assert whole["status"] == "completed"
    assert whole["seed"] == 7
    assert whole["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 12,
    }


@pytest.mark.parametrize("text", ['"', "\\", "\n\n", "\u2028", "\x00delta", "\x00number", "é😀"])
def test_a_lone_delta_says_the_same_as_one_beside_others(text: str) -> None:
    end: list[ChatEvent] = [Finished("stop", USAGE)]
    for begin, more in (
        ([], Text),
        ([], Reasoning),
        ([ToolBegin(0, "c", "add")], partial(ToolArguments, 0)),
        ([ToolBegin(0, "c", "patch")], partial(ToolArguments, 0)),
    ):
        first: list[ChatEvent] = [STARTED, *begin, more("a")]
        alone = streamed([first, [more(text)], [more("!")], end], PATCHING)
        beside = streamed([[*first, more(text), more("!")], end], PATCHING)
        for events in (alone, beside):
            del events[-1]["response"]["completed_at"]
        assert alone == beside


def test_a_message_after_a_call_is_one_of_its_own() -> None:
    call = [ToolBegin(0, "c", "add"), ToolArguments(0, "{}")]
    steps: list[list[ChatEvent]] = [[STARTED], [Text("a")], [*call], [Text("b")], [Text("c")]]
    output = streamed([*steps, [Finished("stop", USAGE)]])[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message"]
    assert output[2]["content"][0]["text"] == "bc"


def test_an_answer_that_was_cut_is_incomplete_and_its_last_item_too() -> None:
    events = [STARTED, Reasoning("hm"), Text("a"), Finished("length", USAGE)]
    last = streamed([events])[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in last["response"]["output"]] == ["completed", "incomplete"]
    assert answered(events) == last["response"]


def test_an_empty_answer_has_an_empty_message() -> None:
    events = streamed([[STARTED], [Finished("stop", USAGE)]])
    assert kinds(events)[2:6] == [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
    ] or kinds(events)[2:5] == ["output_item.added", "content_part.added", "output_text.done"]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


def test_a_stream_that_fails_says_so_and_keeps_what_came() -> None:
    error = HttpError(503, "the engine is gone", "unavailable")
    events = streamed([[STARTED, Text("he")], [Text("llo")]], error=error)
    assert kinds(events)[-2:] == ["failed", "error"]
    response = events[-2]["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "the engine is gone"}
    assert response["output"][0]["content"][0]["text"] == "hello"
    assert response["output"][0]["status"] == "incomplete"
    assert events[-1]["message"] == "the engine is gone"


def test_reasoning_is_shown_as_a_summary_to_who_asked_for_one() -> None:
    style = replace(STYLE, reasoning_as_summary=True)
    events = streamed([[STARTED, Reasoning("hm"), Finished("stop", USAGE)]], style)
    assert kinds(events)[2:-1] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    item = events[-1]["response"]["output"][0]
    assert item["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert item["content"] == []


@pytest.mark.parametrize(
    ("arguments", "written"),
    [('{"input": "a\\nb"}', "a\nb"), ('{"input": "a', '{"input": "a'), ('{"x": 1}', '{"x": 1}')],
)
def test_a_custom_call_has_its_text_or_whatever_was_written(arguments: str, written: str) -> None:
    call = [ToolBegin(0, "c", "patch"), ToolArguments(0, arguments)]
    events = streamed([[STARTED, *call, Finished("stop", USAGE)]], PATCHING)
    assert events[-1]["response"]["output"][0]["input"] == written


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A token for each byte."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return Tokenizer.from_folder(folder)


def tokens(tokenizer: Tokenizer, text: str) -> Logprobs:
    """Of its tokens, each the only candidate there."""
    return Logprobs([{i: Logprob(-0.5, 1, i, tokenizer)} for i in tokenizer.encode(text)])


def named(logprobs: list[dict[str, Any]]) -> str:
    return "".join(entry["token"] for entry in logprobs)


def test_log_probabilities_go_with_the_next_text(tokenizer: Tokenizer) -> None:
    style = replace(STYLE, num_top_logprobs=1)
    events = streamed(
        [
            [STARTED, Reasoning("hm"), tokens(tokenizer, "hm")],
            [Reasoning("!"), tokens(tokenizer, "!")],
            [Text("a"), tokens(tokenizer, "a")],
            [tokens(tokenizer, "b")],  # held back
            [Text("bc"), tokens(tokenizer, "c")],
            [Text("d"), tokens(tokenizer, "d"), Finished("stop", USAGE)],
        ],
        style,
    )
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [named(delta["logprobs"]) for delta in deltas] == ["a", "bc", "d"]
    assert deltas[0]["logprobs"][0]["top_logprobs"][0]["logprob"] == -0.5
    part = events[-1]["response"]["output"][1]["content"][0]
    assert named(part["logprobs"]) == "abcd"


def test_log_probabilities_of_calls_are_not_shown(tokenizer: Tokenizer) -> None:
    style = replace(STYLE, num_top_logprobs=0)
    call = [ToolBegin(0, "c", "add"), ToolArguments(0, "{}")]
    steps: list[list[ChatEvent]] = [
        [STARTED, Text("a"), tokens(tokenizer, "a")],
        [tokens(tokenizer, "<")],
        [*call[:1], tokens(tokenizer, "add")],
        [*call[1:], tokens(tokenizer, "{}")],
        [Text("b"), tokens(tokenizer, "b"), Finished("stop", USAGE)],
    ]
    first, _, last = streamed(steps, style)[-1]["response"]["output"]
    assert named(first["content"][0]["logprobs"]) == "a"
    assert named(last["content"][0]["logprobs"]) == "b"


def test_a_whole_answer_has_the_log_probabilities_after_its_reasoning(
    tokenizer: Tokenizer,
) -> None:
    style = replace(STYLE, num_top_logprobs=0)
    usage = replace(USAGE, num_reasoning_tokens=2)
    end = [tokens(tokenizer, "hmab"), Finished("stop", usage)]
    response = answered([STARTED, Reasoning("hm"), Text("ab"), *end], style)
    assert named(response["output"][1]["content"][0]["logprobs"]) == "ab"


@pytest.mark.parametrize("kind", [ResponseEncoder, ResponseStreamEncoder])
def test_it_is_kept_before_its_end_is_told(
    kind: type[ResponseEncoder] | type[ResponseStreamEncoder],
) -> None:
    kept: list[tuple[bytes, list[Item]]] = []
    encoder = kind(STYLE, lambda body, output: kept.append((body, output)))
    encoder.feed(0, [STARTED, Text("a"), Finished("stop", USAGE)], 1)
    assert kept == []
    end = encoder.finish()
    [(body, output)] = kept
    assert body in end.replace(b',"sequence_number":8', b"")
    assert output[0]["content"][0]["text"] == "a"
