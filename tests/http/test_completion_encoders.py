"""Events to the chunks and objects of /v1/completions, without an engine or a server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nanocore.client.chat.events import ChatEvent, Finished, Logprobs, Started, Text, Usage
from nanocore.client.requests.request_outputs import Logprob
from nanocore.client.tokenizer import Tokenizer
from nanocore.http.dialects.completions import (
    CompletionEncoder,
    CompletionStreamEncoder,
    CompletionStyle,
)
from nanocore.http.dialects.openai_logprobs import Echo, LogprobsShown
from nanocore.http.dialects.request_fields import ResponseId, StreamOptions
from nanocore.http.http_errors import unavailable
from tests.client.byte_tokens import END, ids_of
from tests.tiny_models import write_byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per byte."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return Tokenizer.from_folder(folder)


def style(**given: Any) -> CompletionStyle:
    plain: dict[str, Any] = {
        "head": ResponseId("", "cmpl-1").head("text_completion", "m", "f"),
        "num_samples": 1,
        "logprobs": None,
        "shows_output": True,
        "shows_prompt": False,
        "skip_special_tokens": True,
        "echoes": (),
    }
    return CompletionStyle(**plain | given)


def started(prompt_ids: list[int], **given: Any) -> Started:
    return Started("r", prompt_ids, 1, given.pop("seed", 5), **given)


def finished(num_tokens: int, index: int = 0, reason: Any = "length") -> Finished:
    return Finished(reason, Usage(2, 1, num_tokens, 0), None, None, index)


def candidates(tokenizer: Tokenizer, *found: tuple[int, float]) -> dict[int, Logprob]:
    """The token itself first; ranks by what is likelier."""
    return {
        token_id: Logprob(
            logprob, 1 + sum(other > logprob for _, other in found), token_id, tokenizer
        )
        for token_id, logprob in found
    }


def logprobs_of(tokenizer: Tokenizer, data: bytes | str, index: int = 0) -> Logprobs:
    ids = ids_of(tokenizer, data)
    return Logprobs([candidates(tokenizer, (i, -0.5 - n)) for n, i in enumerate(ids)], index)


def chunks_of(stream: bytes) -> list[Any]:
    """The chunks of a stream; the last line of all must be the end."""
    lines = stream.decode().split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    texts = [line.removeprefix("data: ") for line in lines]
    if texts and texts[-1] == "[DONE]":
        texts.pop()
    return [json.loads(text) for text in texts]


def whole(encoder: CompletionEncoder, *events: ChatEvent) -> Any:
    assert encoder.feed(0, events, 0) == b""
    return json.loads(encoder.finish())


def test_a_text_alone_is_a_chunk_like_any_other(tokenizer: Tokenizer) -> None:
    encoder = CompletionStreamEncoder(style(num_samples=2), StreamOptions(False, False))
    encoder.feed(1, [started([1])], 0)
    quick = chunks_of(encoder.feed(1, [Text('"\n\u00e9', 1)], 1))
    slow = chunks_of(encoder.feed(1, [Text('"\n\u00e9', 1), finished(1, 1)], 1))
    (choice,) = quick[0].pop("choices")
    (ended,) = slow[0].pop("choices")
    assert quick == slow
    assert choice == {
        "index": 3, "text": '"\n\u00e9', "logprobs": None, "finish_reason": None
    }  # fmt: skip
    assert ended == choice | {"finish_reason": "length", "stop_reason": None, "seed": 6}


def test_choices_are_numbered_by_prompt_and_sample(tokenizer: Tokenizer) -> None:
    encoder = CompletionEncoder(style(num_samples=2))
    for number in (2, 0, 1):
        texts = [Text(f"{number}.{index}", index) for index in (1, 0)]
        ends = [finished(3, index) for index in (0, 1)]
        encoder.feed(number, [started([1, 2], seed=number), *texts, *ends], 6)
    answer = json.loads(encoder.finish())
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"] for choice in answer["choices"]] == [
        "0.0", "0.1", "1.0", "1.1", "2.0", "2.1"
    ]  # fmt: skip
    assert [choice["seed"] for choice in answer["choices"]] == [0, 1, 1, 2, 2, 3]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6, 18)
    assert usage["total_tokens"] == 24
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}


def test_the_seeds_of_samples_wrap_around(tokenizer: Tokenizer) -> None:
    encoder = CompletionEncoder(style(num_samples=2))
    events = [started([1], seed=2**53 - 1), finished(1, 0), finished(1, 1)]
    assert [choice["seed"] for choice in whole(encoder, *events)["choices"]] == [2**53 - 1, 0]


def test_offsets_are_places_in_the_text(tokenizer: Tokenizer) -> None:
    text = "a\u00e9\U0001f600b"
    encoder = CompletionEncoder(style(logprobs=LogprobsShown(tokenizer, 0, False)))
    events = [started([1]), Text(text), logprobs_of(tokenizer, text), finished(8)]
    (choice,) = whole(encoder, *events)["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3]
    assert choice["logprobs"]["tokens"] == ["a", *"\ufffd" * 6, "b"]


def test_a_special_token_that_is_no_text_takes_no_room(tokenizer: Tokenizer) -> None:
    ids = [*ids_of(tokenizer, "a"), END, *ids_of(tokenizer, "b")]
    tokens = Logprobs([candidates(tokenizer, (token_id, -1.0)) for token_id in ids])
    offsets = {}
    for skips in (True, False):
        encoder = CompletionEncoder(
            style(logprobs=LogprobsShown(tokenizer, 0, False), skip_special_tokens=skips)
        )
        (choice,) = whole(encoder, started([1]), tokens, finished(3))["choices"]
        offsets[skips] = choice["logprobs"]["text_offset"]
    assert offsets == {True: [0, 1, 1], False: [0, 1, 1 + len("<|end|>")]}


def test_of_candidates_those_asked_for_and_the_token_itself(tokenizer: Tokenizer) -> None:
    a, b, c = ids_of(tokenizer, "abc")
    tokens = Logprobs([candidates(tokenizer, (a, -3.0), (b, -1.0), (c, -2.0))])
    tops = {}
    for num_top in (0, 1, 2, -1):
        encoder = CompletionEncoder(style(logprobs=LogprobsShown(tokenizer, num_top, False)))
        (choice,) = whole(encoder, started([1]), tokens, finished(1))["choices"]
        (tops[num_top],) = choice["logprobs"]["top_logprobs"]
        assert choice["logprobs"]["token_logprobs"] == [-3.0]
    all_of_them = {"a": -3.0, "b": -1.0, "c": -2.0}
    assert tops == {
        0: {"a": -3.0}, 1: {"a": -3.0, "b": -1.0}, 2: all_of_them, -1: all_of_them
    }  # fmt: skip


def test_of_tokens_with_equal_texts_the_likelier_one_is_shown(tokenizer: Tokenizer) -> None:
    first, second = ids_of(tokenizer, b"\xc3\xa9")  # both are U+FFFD
    tokens = Logprobs([candidates(tokenizer, (first, -3.0), (second, -1.0))])
    encoder = CompletionEncoder(style(logprobs=LogprobsShown(tokenizer, 1, False)))
    (choice,) = whole(encoder, started([1]), tokens, finished(1))["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-3.0]
    assert choice["logprobs"]["top_logprobs"] == [{"\ufffd": -1.0}]


def test_tokens_may_be_shown_by_their_ids(tokenizer: Tokenizer) -> None:
    first, second = ids_of(tokenizer, b"\xc3\xa9")
    tokens = Logprobs([candidates(tokenizer, (first, -3.0), (second, float("-inf")))])
    encoder = CompletionEncoder(style(logprobs=LogprobsShown(tokenizer, 2, True)))
    (choice,) = whole(encoder, started([1]), tokens, finished(1))["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{first}"]
    (top,) = choice["logprobs"]["top_logprobs"]
    assert top == {f"token_id:{first}": -3.0, f"token_id:{second}": -9999.0}


def echo_events(tokenizer: Tokenizer) -> list[ChatEvent]:
    prompt = ids_of(tokenizer, "h\u00e9")
    of_prompt: Any = [None, *logprobs_of(tokenizer, "\u00e9").tokens]
    return [
        started(prompt, prompt_logprobs=of_prompt),
        Text("!"),
        logprobs_of(tokenizer, "!"),
        finished(1),
    ]


EXPECTED_ECHO = {
    "tokens": ["h", "\ufffd", "\ufffd", "!"],
    "token_logprobs": [None, -0.5, -1.5, -0.5],
    "top_logprobs": [None, {"\ufffd": -0.5}, {"\ufffd": -1.5}, {"!": -0.5}],
    "text_offset": [0, 1, 1, 2],
}


def test_an_echo_has_the_prompts_own_tokens(tokenizer: Tokenizer) -> None:
    echo = Echo.of_tokens(tokenizer, ids_of(tokenizer, "h\u00e9"), None)
    encoder = CompletionEncoder(style(logprobs=LogprobsShown(tokenizer, 1, False), echoes=[echo]))
    (choice,) = whole(encoder, *echo_events(tokenizer))["choices"]
    assert choice["text"] == "h\u00e9!"
    assert choice["logprobs"] == EXPECTED_ECHO
    assert "prompt_logprobs" not in choice


def test_a_streamed_echo_makes_the_same(tokenizer: Tokenizer) -> None:
    echo = Echo.of_tokens(tokenizer, ids_of(tokenizer, "h\u00e9"), None)
    encoder = CompletionStreamEncoder(
        style(logprobs=LogprobsShown(tokenizer, 1, False), echoes=[echo]), StreamOptions()
    )
    chunks = chunks_of(encoder.feed(0, echo_events(tokenizer), 1) + encoder.finish())
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == "h\u00e9!"
    joined = {
        name: [one for choice in choices for one in choice["logprobs"][name]]
        for name in EXPECTED_ECHO
    }
    assert joined == EXPECTED_ECHO


def test_what_the_tokenizer_adds_to_a_text_has_a_place_and_no_room(tokenizer: Tokenizer) -> None:
    ids = [END, *ids_of(tokenizer, "ab"), END]
    assert Echo.of_tokens(tokenizer, ids, "ab", (1, 1)).offsets == [0, 0, 1, 2]


def test_without_output_there_is_the_prompt_alone(tokenizer: Tokenizer) -> None:
    echo = Echo.of_tokens(tokenizer, ids_of(tokenizer, "h\u00e9"), None)
    hidden = style(logprobs=LogprobsShown(tokenizer, 1, False), echoes=[echo], shows_output=False)
    answer = whole(CompletionEncoder(hidden), *echo_events(tokenizer))
    (choice,) = answer["choices"]
    assert choice["text"] == "h\u00e9"
    assert choice["logprobs"] == {name: found[:3] for name, found in EXPECTED_ECHO.items()}
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    stream = CompletionStreamEncoder(hidden, StreamOptions(True, False))
    chunks = chunks_of(stream.feed(0, echo_events(tokenizer), 1) + stream.finish())
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == "h\u00e9"
    assert chunks[-1]["usage"]["completion_tokens"] == 0


def test_vllms_prompt_logprobs_stand_beside(tokenizer: Tokenizer) -> None:
    encoder = CompletionEncoder(style(shows_prompt=True))
    (choice,) = whole(encoder, *echo_events(tokenizer))["choices"]
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    ids = ids_of(tokenizer, "\u00e9")
    assert [[*one] for one in (second, third)] == [[str(token_id)] for token_id in ids]
    assert second[str(ids[0])] == {"logprob": -0.5, "rank": 1, "decoded_token": "\ufffd"}


def test_a_stream_tells_its_usage_at_the_end_or_all_the_time(tokenizer: Tokenizer) -> None:
    for always in (False, True):
        encoder = CompletionStreamEncoder(style(), StreamOptions(True, always))
        stream = encoder.feed(0, [started([1, 2, 3]), Text("a")], 1)
        stream += encoder.feed(1, [started([4]), Text("b")], 1)
        stream += encoder.feed(0, [Text("c")], 2)
        stream += encoder.feed(0, [finished(2)], 2) + encoder.feed(1, [finished(1)], 1)
        *chunks, last = chunks_of(stream + encoder.finish())
        assert last["choices"] == []
        counts = [(3, 1), (4, 2), (4, 3), (4, 3), (4, 3)]
        usages = [chunk.get("usage") for chunk in chunks]
        assert [u and (u["prompt_tokens"], u["completion_tokens"]) for u in usages] == (
            counts if always else [None] * 5
        )
        assert (last["usage"]["prompt_tokens"], last["usage"]["total_tokens"]) == (4, 7)


def test_a_stream_that_fails_says_so_and_does_not_end_as_others(tokenizer: Tokenizer) -> None:
    encoder = CompletionStreamEncoder(style(), StreamOptions(True, False))
    (chunk,) = chunks_of(encoder.fail(unavailable("gone")))
    assert chunk["error"]["message"] == "gone"
