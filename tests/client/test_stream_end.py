"""How a request's stream ends: by the engine, by a stop string, or by its reader."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import EngineDeadError
from tests.campaign import examples
from tests.client.byte_tokens import END, ids_of
from tests.client.driven_stream import DrivenStream
from tests.client.running import run


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
