"""A request's stream while it runs: what arrives is merged, detokenized and handed out."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.errors import ContextLengthError, EngineDeadError
from tests.client.byte_tokens import END, ids_of
from tests.client.driven_stream import DrivenStream


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
