"""Samples of one request side by side: each with its own tokens, text, stop strings and end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from nanocore.client import InvalidRequestError, SamplingParams
from nanocore.client.requests.submission import bad_words_token_ids
from nanocore.client.tokenizer import Tokenizer
from nanocore.protocol.codec import pack_uint32
from nanocore.protocol.errors import EngineDeadError
from nanocore.protocol.messages import Abort, Event
from tests.client.byte_tokens import ids_of
from tests.client.driven_stream import DrivenStream
from tests.client.fake_engine import connected, welcome_message
from tests.client.running import run


def _texts(output: Any) -> list[tuple[str, str]]:
    return [(completion.text, completion.delta) for completion in output.outputs]


def test_an_output_has_all_samples_in_order_and_what_is_new_of_each(tokenizer: Tokenizer) -> None:
    driven = DrivenStream(tokenizer, n=3)
    driven.push("ab", index=2)
    driven.push("x", index=0)
    first = driven.next()
    driven.push("c", index=2)
    second = driven.next()
    assert _texts(first) == [("x", "x"), ("", ""), ("ab", "ab")]
    assert _texts(second) == [("x", ""), ("", ""), ("abc", "c")]
    assert [completion.index for completion in second.outputs] == [0, 1, 2]
    assert second.metrics.num_output_tokens == 4
    assert first.metrics.num_output_tokens == 3


def test_a_request_is_finished_when_all_samples_are(tokenizer: Tokenizer) -> None:
    driven = DrivenStream(tokenizer, n=2)
    driven.push("a", index=1)
    driven.end("length", index=1)
    first = driven.next()
    assert not first.finished
    assert [c.finish_reason for c in first.outputs] == [None, "length"]
    driven.push("b")
    driven.end("stop")
    last = driven.next()
    assert last.finished
    assert [c.finish_reason for c in last.outputs] == ["stop", "length"]
    assert driven.rest() == []
    assert driven.aborts == []


def test_a_stop_string_ends_its_sample_alone_and_the_last_one_the_request(
    tokenizer: Tokenizer,
) -> None:
    driven = DrivenStream(tokenizer, n=2, stop="END")
    driven.push("abENDx", index=1)
    driven.push("cd", index=0)
    first = driven.next()
    assert driven.aborts == [1]
    assert [(c.text, c.finish_reason) for c in first.outputs] == [("cd", None), ("ab", "stop")]
    assert first.outputs[1].token_ids == ids_of(tokenizer, "abEND")
    driven.push("END")
    assert driven.next().finished
    assert driven.aborts == [1, "r"]
    driven.stream.close()
    assert driven.aborts == [1, "r"]


def test_a_failure_fails_all_samples_after_what_came_before(tokenizer: Tokenizer) -> None:
    driven = DrivenStream(tokenizer, n=2)
    driven.push("a", index=1)
    driven.end(index=0)
    driven.stream.fail(EngineDeadError("gone"))
    assert _texts(driven.next()) == [("", ""), ("a", "a")]
    with pytest.raises(EngineDeadError, match="gone"):
        driven.next()


async def test_final_waits_for_every_sample(tokenizer: Tokenizer) -> None:
    driven = DrivenStream(tokenizer, n=2)

    waiting = asyncio.ensure_future(driven.stream.final())
    for index, text in enumerate(("a", "b")):
        await asyncio.sleep(0)
        assert not waiting.done()
        driven.push(text, index)
        driven.end(index=index)
    assert [completion.text for completion in (await waiting).outputs] == ["a", "b"]


async def test_samples_have_handles_from_the_first_one_on(endpoint: str) -> None:
    params = SamplingParams(n=3, detokenize=False)

    async with connected(endpoint) as (engine, client):
        request = asyncio.create_task(client.complete([1], params))
        other = asyncio.create_task(client.complete([1], SamplingParams(detokenize=False)))
        assert (await engine.accept(5)).sampling.n == 3
        await engine.accept(8)
        ends = [Event(handle=handle, finish_reason="length") for handle in (7, 5, 6, 8)]
        engine.output({6: [60], 8: [80], 7: [70], 5: [50, 51]}, *ends)
        outputs = (await request).outputs
        assert [output.token_ids for output in outputs] == [[50, 51], [60], [70]]
        assert (await other).outputs[0].token_ids == [80]


async def test_a_single_samples_end_is_told_by_its_handle(
    endpoint: str, tokenizer_folder: Any
) -> None:
    async with connected(endpoint, tokenizer=tokenizer_folder) as (engine, client):
        ids = ids_of(await client.get_tokenizer(), "ab.")
        outputs = client.generate([1], SamplingParams(n=2, stop="."), request_id="r")
        reading = await engine.begin(anext(outputs), 3)
        engine.output({3: ids[:1], 4: ids})
        assert [o.finish_reason for o in (await reading).outputs] == [None, "stop"]
        assert await engine.receive(Abort) == Abort(request_ids=[], handles=pack_uint32([4]))
        engine.output({4: [1, 2]}, Event(handle=4, finish_reason="abort"))
        engine.output({3: ids[1:2]})
        last = await anext(outputs)
        assert [(o.text, o.finish_reason) for o in last.outputs] == [("ab", None), ("ab", "stop")]
        await outputs.aclose()
        assert await engine.receive(Abort) == Abort(request_ids=["r"])


@pytest.mark.parametrize(
    "params",
    [{"n": 2}, {"logprobs": 0}, {"min_tokens": 1}, {"bad_words": ["a"]}, {"logit_bias": {1: 1.0}}],
    ids=lambda params: next(iter(params)),
)
async def test_an_older_engine_is_not_asked_for_what_it_does_not_know(
    endpoint: str, tokenizer_folder: Any, params: dict[str, Any]
) -> None:
    welcome = replace(welcome_message(), protocol=(1, 4))
    async with connected(endpoint, welcome, tokenizer=tokenizer_folder) as (engine, client):
        name = next(iter(params))
        with pytest.raises(InvalidRequestError, match=rf"^{name} .*1\.5, .* speaks 1\.4"):
            await client.complete([1], SamplingParams(**params))
        known = SamplingParams(skip_reading_prefix_cache=True)
        request = asyncio.create_task(client.complete([1], known))
        assert (await engine.accept()).sampling == known.for_engine()
        engine.finish()
        await request


async def test_bad_words_are_tokenized_alone_and_after_a_space(
    endpoint: str, tokenizer_folder: Any
) -> None:
    async with connected(endpoint, tokenizer=tokenizer_folder) as (engine, client):
        tokenizer = await client.get_tokenizer()
        params = SamplingParams(bad_words=["ab", " c"], detokenize=False)
        request = asyncio.create_task(client.complete([1], params))
        # A byte more: the word after a space is longer, so it holds the word itself.
        assert (await engine.accept()).sampling.bad_words_token_ids == [
            ids_of(tokenizer, "ab"),
            ids_of(tokenizer, "c"),
        ]
        engine.finish()
        await request
        with pytest.raises(InvalidRequestError, match="no tokens"):
            await client.complete([1], SamplingParams(bad_words=["  "]))


async def test_bad_words_need_a_tokenizer(endpoint: str) -> None:
    async with connected(endpoint) as (_, client):
        with pytest.raises(InvalidRequestError, match=r"tokenizer"):
            await client.complete([1], SamplingParams(bad_words=["a"], detokenize=False))


class _Words:
    """A tokenizer that knows words with the space before them, as those of real models do."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return {"ab": [1], " ab": [2], "c": [3], " c": [9, 3], "de": [4, 5], " de": [6]}[text]


def test_a_word_after_a_space_counts_if_it_is_a_token_of_its_own() -> None:
    tokenizer: Any = _Words()
    sequences = run(bad_words_token_ids(tokenizer, [" ab", "c", "de"]))
    assert sequences == [[1], [2], [3], [4, 5], [6]]
