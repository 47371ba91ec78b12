"""A request's stream: what arrives is merged, detokenized and handed out, and how it ends."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanocore.client.requests.request_outputs import CompletionOutput
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import ContextLengthError, EngineDeadError
from tests.campaign import examples
from tests.client.byte_tokens import END, ids_of
from tests.client.driven_stream import DrivenStream
from tests.client.running import run


def test_an_output_has_the_text_so_far_and_what_is_new(tokenizer: Tokenizer) -> None:
    driven = DrivenStream(tokenizer)
    driven.push("ab")
    first = driven.next()
    driven.push("c")
    second = driven.next()
    assert [(o.outputs[0].text, o.outputs[0].delta) for o in (first, second)] == [
        ("ab", "ab"),
        ("abc", "c"),
    ]
    assert second.outputs[0].token_ids == ids_of(tokenizer, "abc")
    assert not second.finished
    assert second.outputs[0].finish_reason is None


def test_unread_tokens_are_merged_into_one_output(tokenizer: Tokenizer) -> None:
    driven = DrivenStream(tokenizer)
    for character in "hello":
        driven.push(character)
    driven.end()
    outputs = driven.rest()
    assert [output.outputs[0].delta for output in outputs] == ["hello"]
    assert outputs[0].finished


def test_a_snapshot_does_not_change_when_more_arrives(tokenizer: Tokenizer) -> None:
    driven = DrivenStream(tokenizer)
    driven.push("ab")
    first = driven.next()
    driven.push("cd")
    driven.end("stop", stop_reason=END)
    driven.rest()
    completion = first.outputs[0]
    assert (completion.text, completion.delta) == ("ab", "ab")
    assert completion.token_ids == ids_of(tokenizer, "ab")
    assert completion.finish_reason is None
    assert not first.finished
    assert first.metrics.num_output_tokens == 2


def test_changing_an_outputs_lists_does_not_change_the_next(tokenizer: Tokenizer) -> None:
    driven = DrivenStream(tokenizer)
    driven.push("ab")
    driven.next().outputs[0].token_ids.clear()
    driven.push("c")
    assert driven.next().outputs[0].token_ids == ids_of(tokenizer, "abc")


def test_without_detokenization_there_are_token_ids_and_no_text(tokenizer: Tokenizer) -> None:
    driven = DrivenStream(tokenizer, detokenize=False)
    driven.push("ab")
    driven.end("stop", stop_reason=END)
    completion = driven.final().outputs[0]
    assert completion.text == completion.delta == ""
    assert completion.token_ids == ids_of(tokenizer, "ab")


async def test_news_without_tokens_or_end_is_not_an_output(tokenizer: Tokenizer) -> None:
    driven = DrivenStream(tokenizer)
    driven.say(num_cached_tokens=0)
    driven.push("")

    reading = asyncio.ensure_future(driven.stream.__anext__())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not reading.done()
    driven.push("a")
    assert (await reading).outputs[0].text == "a"


def test_a_refusal_is_raised_and_ends_the_stream(tokenizer: Tokenizer) -> None:
    driven = DrivenStream(tokenizer)
    driven.stream.fail(ContextLengthError("too long"))
    with pytest.raises(ContextLengthError, match="too long"):
        driven.next()
    assert driven.rest() == []


@pytest.mark.parametrize("stop", [[], ["END"]])
def test_final_raises_a_failure_that_follows_unread_tokens(
    tokenizer: Tokenizer, stop: list[str]
) -> None:
    driven = DrivenStream(tokenizer, stop=stop)
    driven.push("ab")
    driven.stream.fail(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError, match="gone"):
        driven.final()


def test_a_failure_after_the_end_does_not_spoil_the_result(tokenizer: Tokenizer) -> None:
    driven = DrivenStream(tokenizer)
    driven.push("ab")
    driven.end()
    driven.stream.fail(EngineDeadError("gone"))
    assert driven.final().outputs[0].text == "ab"


def test_a_request_that_ends_without_tokens_has_no_time_to_first_token(
    tokenizer: Tokenizer,
) -> None:
    driven = DrivenStream(tokenizer)
    driven.end("abort")
    metrics = driven.final().metrics
    assert metrics.time_to_first_token_s is None
    assert metrics.num_output_tokens == metrics.output_tokens_per_s == 0
    assert metrics.time_per_output_token_s is None
    assert metrics.e2e_latency_s >= 0


def test_times_are_those_of_the_first_token_and_the_end_however_late_they_are_read(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("nanocore.client.requests.progress.time", clock)
    monkeypatch.setattr("nanocore.client.requests.request_outputs.time", clock)
    driven = DrivenStream(tokenizer)
    now_s = 101.0
    driven.push("a")
    now_s = 102.0
    driven.push("b")
    now_s = 103.0
    driven.end()
    now_s = 200.0
    metrics = driven.final().metrics
    assert (metrics.time_to_first_token_s, metrics.e2e_latency_s) == (1.0, 3.0)
    assert (metrics.time_per_output_token_s, metrics.output_tokens_per_s) == (2.0, 2 / 3)


def test_an_end_after_everything_was_read_is_an_output_of_its_own(tokenizer: Tokenizer) -> None:
    driven = DrivenStream(tokenizer)
    driven.push("ab")
    driven.next()
    driven.end()
    (last,) = driven.rest()
    assert last.finished
    assert (last.outputs[0].delta, last.outputs[0].text) == ("", "ab")


@pytest.mark.parametrize(
    ("params", "pushed", "end", "text"),
    [
        ({}, b"ab", {"finish_reason": "length"}, "ab"),
        ({}, b"ab.", {"finish_reason": "length"}, "ab."),
        ({}, b"ab", {"finish_reason": "abort"}, "ab"),
        ({}, b"ab", {"finish_reason": "abort", "message": "SIGTERM"}, "ab"),
        ({}, b"", {"finish_reason": "error", "message": "the forward pass failed"}, ""),
        ({}, b"ab.", {"finish_reason": "stop", "stop_reason": ord(".")}, "ab"),
        (
            {"include_stop_str_in_output": True},
            b"ab.",
            {"finish_reason": "stop", "stop_reason": ord(".")},
            "ab.",
        ),
        ({}, b"ab\xe4\xb8", {"finish_reason": "length"}, "ab"),  # half a character is dropped
    ],
)
def test_an_end_by_the_engine_has_its_reasons_and_all_token_ids(
    tokenizer: Tokenizer, params: dict[str, Any], pushed: bytes, end: dict[str, Any], text: str
) -> None:
    driven = DrivenStream(tokenizer, **params)
    driven.push(pushed)
    driven.say(**end)
    output = driven.final()
    (completion,) = output.outputs
    assert output.finished
    assert (completion.text, completion.token_ids) == (text, ids_of(tokenizer, pushed))
    expected = {"stop_reason": None, "message": None, **end}
    assert {name: getattr(completion, name) for name in expected} == expected
    assert driven.aborts == []


def test_the_eos_token_is_not_text_even_when_special_tokens_are_kept(tokenizer: Tokenizer) -> None:
    driven = DrivenStream(tokenizer, skip_special_tokens=False)
    driven.push("ab")
    driven.stream.samples[0].push_tokens([END])
    driven.end("stop", stop_reason=END)
    completion = driven.final().outputs[0]
    assert completion.text == "ab"
    assert completion.token_ids[-1] == END


def test_a_stop_string_ends_the_request_and_aborts_it_once(tokenizer: Tokenizer) -> None:
    driven = DrivenStream(tokenizer, stop=["END"])
    driven.push("abENDcd")
    (output,) = driven.rest()
    assert output.finished
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "END")
    assert (completion.text, completion.delta) == ("ab", "ab")
    assert driven.aborts == ["r"]
    driven.stream.close()
    assert driven.aborts == ["r"]


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abEND")])
def test_the_token_ids_end_with_the_stop_string(
    tokenizer: Tokenizer, include: bool, text: str
) -> None:
    driven = DrivenStream(tokenizer, stop="END", include_stop_str_in_output=include)
    driven.push("abENDcd")
    output = driven.final()  # before the engine's end
    assert output.outputs[0].text == text
    assert output.outputs[0].token_ids == ids_of(tokenizer, "abEND")
    assert output.metrics.num_output_tokens == 5
    assert driven.aborts == ["r"]


def test_a_stop_string_found_after_the_engines_end_needs_no_abort(tokenizer: Tokenizer) -> None:
    driven = DrivenStream(tokenizer, stop=["END"])
    driven.push("abENDcd")
    driven.end("length")
    completion = driven.final().outputs[0]
    assert (completion.text, completion.finish_reason) == ("ab", "stop")
    assert driven.aborts == []


def test_text_held_back_for_a_stop_string_is_released_at_the_end(tokenizer: Tokenizer) -> None:
    driven = DrivenStream(tokenizer, stop=["END"])
    driven.push("abEN")
    assert driven.next().outputs[0].text == "ab"
    driven.end("length")
    last = driven.next().outputs[0]
    assert (last.text, last.delta, last.finish_reason) == ("abEN", "EN", "length")


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(
    pieces=st.lists(st.text("aéb", min_size=1, max_size=4), max_size=6),
    stop=st.text("aéb", min_size=1, max_size=3),
)
def test_merging_changes_neither_text_nor_token_ids(
    tokenizer: Tokenizer, pieces: list[str], stop: str
) -> None:
    eager, lazy = DrivenStream(tokenizer, stop=[stop]), DrivenStream(tokenizer, stop=[stop])
    text = "".join(pieces)
    before, found, _ = text.partition(stop)
    outputs = run(eager.read_between(pieces))
    lazy.push(text)
    lazy.end("length")
    for last in (outputs[-1].outputs[0], lazy.final().outputs[0]):
        assert last.text == before
        assert last.token_ids == ids_of(tokenizer, before + found)
        assert last.stop_reason == (stop if found else None)
    assert "".join(output.outputs[0].delta for output in outputs) == before


def test_leaving_a_failed_request_does_not_abort_it(tokenizer: Tokenizer) -> None:
    driven = DrivenStream(tokenizer)
    driven.stream.fail(EngineDeadError("gone"))
    driven.stream.close()
    assert driven.aborts == []


def _stopped(text: str, stops: list[str], min_tokens: int, include: bool) -> tuple[str, str | None]:
    """The specification for tokens of one character: the first end beyond the first min_tokens."""
    for end in range(min_tokens + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=examples(100), deadline=None, derandomize=True)
@given(
    pieces=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=6),
    stops=st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3),
    min_tokens=st.integers(0, 8),
    include=st.booleans(),
)
def test_stop_strings_count_from_min_tokens_on_however_tokens_are_merged(
    tokenizer: Tokenizer, pieces: list[str], stops: list[str], min_tokens: int, include: bool
) -> None:
    text = "".join(pieces)
    expected = _stopped(text, stops, min_tokens, include)
    params = {"stop": stops, "min_tokens": min_tokens, "include_stop_str_in_output": include}
    eager, lazy = DrivenStream(tokenizer, **params), DrivenStream(tokenizer, **params)
    outputs = run(eager.read_between(pieces))
    lazy.push(text)
    lazy.end("length")
    for last in (outputs[-1].outputs[0], lazy.final().outputs[0]):
        assert (last.text, last.stop_reason) == expected
        num_tokens = len(last.token_ids)
        whole = text[:num_tokens]
        assert last.text == (whole if include or not expected[1] else whole[: -len(expected[1])])
    assert "".join(output.outputs[0].delta for output in outputs) == expected[0]


def test_a_printed_completion_shows_its_own_moment_and_the_cause_of_its_end() -> None:
    parts, token_ids = ["a"], [1]
    completion = CompletionOutput(parts, 1, token_ids, 1, "a", "stop", "END")
    parts.append("b")
    token_ids.append(2)
    assert repr(completion) == (
        "CompletionOutput(text='a', num_tokens=1, finish_reason='stop', stop_reason='END')"
    )

    completion = CompletionOutput([], 0, [], 0, "", "error", None, "out of memory")
    assert repr(completion).endswith("stop_reason=None, message='out of memory')")
