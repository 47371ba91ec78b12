"""Embeddings in the SDK: what is asked for, and what becomes of the engine's numbers."""

from __future__ import annotations

import asyncio
import math
from array import array
from typing import Any

import pytest
from msgspec.structs import replace

from nanocore.client import InvalidRequestError, NanocoreError, ProtocolError, SamplingParams
from nanocore.client.requests.request_outputs import EmbeddingOutput
from nanocore.protocol.messages import Abort, Error, Event, Submit
from nanocore.protocol.sampling import EngineSamplingParams
from tests.client.fake_engine import connected, welcome_message
from tests.client.running import run
from tests.client.served_llm import served

ABLE = replace(welcome_message(), capabilities=["embeddings"])


def end(handle: int, *numbers: float, cached: int = 0) -> Event:
    embedding = array("f", numbers).tobytes()
    return Event(handle=handle, num_cached_tokens=cached, finish_reason="stop", embedding=embedding)


def norm(embedding: array[float]) -> float:
    return math.sqrt(sum(number * number for number in embedding))


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize(
    ("normalize", "numbers", "expected"),
    [
        (True, (3.0, -4.0), [0.6, -0.8]),
        (False, (3.0, -4.0), [3.0, -4.0]),
        (True, (0.0, 0.0), [0.0, 0.0]),
        (True, (3e38, -3e38), [math.sqrt(0.5), -math.sqrt(0.5)]),
        (True, (1e-40, 0.0), [1.0, 0.0]),
    ],
)
async def test_a_prompts_embedding_has_length_1_unless_it_is_not_wanted_so(
    endpoint: str, pooling: Any, normalize: bool, numbers: tuple[float, ...], expected: list[float]
) -> None:
    async with connected(endpoint, ABLE) as (engine, client):
        call = client.embed([1, 2, 3], pooling, normalize, "mine", 2, "salt")
        request = asyncio.create_task(call)
        submit = await engine.accept()
        assert submit.sampling == EngineSamplingParams(pooling=pooling)
        said = submit.request_id, submit.priority, submit.cache_salt
        assert said == ("mine", 2, "salt")
        engine.output({}, end(1, *numbers, cached=2))
        output = await request
        assert isinstance(output, EmbeddingOutput)
        assert output.embedding == pytest.approx(array("f", expected), rel=1e-6)
        assert (output.request_id, output.num_cached_tokens) == ("mine", 2)
        assert output.prompt_token_ids == [1, 2, 3]


async def test_a_text_is_tokenized_as_others_are(endpoint: str, tokenizer_folder: Any) -> None:
    async with connected(endpoint, ABLE, tokenizer=tokenizer_folder) as (engine, client):
        request = asyncio.create_task(client.embed("abc"))
        submit = await engine.accept()
        assert submit.sampling == EngineSamplingParams(pooling="last")
        engine.output({}, end(1, 1.0))
        output = await request
        expected = (await client.get_tokenizer()).encode("abc")
        assert [*output.prompt_token_ids] == [*expected]


@pytest.mark.parametrize("pooling", ["cls", "", None, 1])
async def test_a_pooling_that_there_is_not_is_refused_at_once(endpoint: str, pooling: Any) -> None:
    async with connected(endpoint, ABLE) as (_, client):
        with pytest.raises(InvalidRequestError, match="pooling="):
            await client.embed([1], pooling)


def test_an_engine_before_1_7_or_without_the_capability_is_not_asked(endpoint: str) -> None:
    async def scenario(welcome: Any, words: str) -> None:
        async with connected(endpoint, welcome) as (_, client):
            with pytest.raises(InvalidRequestError, match=words):
                await client.embed([1])

    run(scenario(replace(ABLE, protocol=(1, 6)), "pooling came with protocol 1.7"))
    run(scenario(replace(ABLE, capabilities=["priority"]), "does not compute embeddings"))


@pytest.mark.parametrize(
    ("reason", "message"), [("abort", None), ("abort", "SIGTERM"), ("error", "it is NaN")]
)
async def test_a_request_that_ends_without_one_says_why(
    endpoint: str, reason: Any, message: str | None
) -> None:
    async with connected(endpoint, ABLE) as (engine, client):
        request = asyncio.create_task(client.embed([1], request_id="mine"))
        await engine.accept()
        engine.output({}, Event(handle=1, finish_reason=reason, message=message))
        with pytest.raises(NanocoreError, match=f"'mine' .* ended with '{reason}'") as caught:
            await request
        assert caught.value.request_id == "mine"
        assert message is None or message in str(caught.value)


@pytest.mark.parametrize("embedding", [None, b"", b"\0\0\0"])
async def test_a_stop_without_whole_numbers_breaks_the_protocol(
    endpoint: str, embedding: bytes | None
) -> None:
    async with connected(endpoint, ABLE) as (engine, client):
        request = asyncio.create_task(client.embed([1]))
        await engine.accept()
        engine.output({}, Event(handle=1, finish_reason="stop", embedding=embedding))
        with pytest.raises(ProtocolError, match=r"embedding of \d bytes"):
            await request


@pytest.mark.parametrize("numbers", [(1.0, 2.0), (1.0, math.nan, 2.0), (math.inf, 0.0, 0.0)])
async def test_numbers_that_the_model_cannot_have_break_the_protocol(
    endpoint: str, numbers: tuple[float, ...]
) -> None:
    welcome = replace(ABLE, model=replace(ABLE.model, hidden_size=3))

    async with connected(endpoint, welcome) as (engine, client):
        embedding = asyncio.create_task(client.embed([1]))
        await engine.accept()
        engine.output({}, end(1, *numbers))
        with pytest.raises(ProtocolError, match="hidden_size"):
            await embedding


async def test_who_goes_away_aborts(endpoint: str) -> None:
    async with connected(endpoint, ABLE) as (engine, client):
        request = asyncio.create_task(client.embed([1], request_id="mine"))
        await engine.accept()
        request.cancel()
        assert (await engine.receive(Abort)).request_ids == ["mine"]


async def test_others_take_no_notice_of_one_that_they_did_not_ask_for(endpoint: str) -> None:
    async with connected(endpoint, ABLE) as (engine, client):
        request = asyncio.create_task(client.complete([1], SamplingParams(detokenize=False)))
        await engine.accept()
        engine.output({1: [5]}, end(1, 1.0))
        output = await request
        assert output.embedding is None
        assert output.outputs[0].token_ids == [5]


async def test_encode_gives_them_in_the_order_of_the_prompts_and_tries_again(joining: str) -> None:
    async with served(joining, ABLE) as (engine, llm):
        call = asyncio.create_task(
            asyncio.to_thread(llm.encode, [[1], [2]], pooling="mean", use_tqdm=False)
        )
        first = await engine.receive(Submit)
        busy = Error(
            code="overloaded", message="wait", request_id=first.request_id, retry_after_s=0.001
        )
        engine.send(busy)
        handles: dict[int, int] = {}
        for handle in (1, 2):
            submit = await engine.accept(handle)
            assert submit.sampling == EngineSamplingParams(pooling="mean")
            handles[submit.prompt_token_ids[0]] = handle
        for prompt in (2, 1):
            engine.output({}, end(handles[prompt], float(prompt), 0.0))
        outputs = await call
        assert [output.prompt_token_ids for output in outputs] == [[1], [2]]
        assert [norm(output.embedding) for output in outputs] == [1.0, 1.0]


async def test_encode_of_one_prompt_and_unnormalized(joining: str) -> None:
    async with served(joining, ABLE) as (engine, llm):
        call = asyncio.create_task(asyncio.to_thread(llm.encode, [7, 8], normalize=False))
        assert (await engine.accept()).sampling == EngineSamplingParams(pooling="last")
        engine.output({}, end(1, 3.0, 4.0))
        (output,) = await call
        assert [*output.embedding] == [3.0, 4.0]


async def test_what_encode_cannot_ask_is_refused(joining: str) -> None:
    async with served(joining, ABLE) as (_, llm):
        with pytest.raises(InvalidRequestError, match="pooling='max' is unknown"):
            await asyncio.to_thread(llm.encode, [[1]], pooling="max")
        assert await asyncio.to_thread(llm.encode, []) == []
