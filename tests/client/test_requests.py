"""Requests over the wire, against a fake engine: what is sent, what comes back, and refusals."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from nanocore.client import (
    ContextLengthError,
    EngineOverloadedError,
    InvalidRequestError,
    NanocoreError,
    ProtocolError,
    SamplingParams,
)
from nanocore.protocol.codec import pack_int32
from nanocore.protocol.errors import ErrorCode
from nanocore.protocol.messages import Abort, Error, Event, Output, Submit
from tests.client.fake_engine import NO_TEXT, connected


async def test_a_submit_holds_what_the_engine_needs_and_no_text_options(endpoint: str) -> None:
    params = SamplingParams(temperature=0.5, max_tokens=3, seed=9, detokenize=False)

    async with connected(endpoint) as (engine, client):
        request = asyncio.create_task(
            client.complete([1, 2], params, request_id="r", priority=-2, cache_salt="salt")
        )
        assert await engine.accept() == Submit(
            request_id="r",
            prompt_token_ids=pack_int32([1, 2]),
            sampling=params.for_engine(),
            priority=-2,
            cache_salt="salt",
        )
        engine.finish()
        await request


async def test_requests_without_a_name_get_different_ones(endpoint: str) -> None:
    async with connected(endpoint) as (engine, client):
        requests = [asyncio.create_task(client.complete([1], NO_TEXT)) for _ in range(2)]
        names = {(await engine.accept(handle)).request_id for handle in (1, 2)}
        assert len(names) == 2
        engine.finish(1)
        engine.finish(2)
        outputs = await asyncio.gather(*requests)
        assert {output.request_id for output in outputs} == names


async def test_a_stream_gives_each_steps_token_as_it_comes(endpoint: str) -> None:
    async with connected(endpoint) as (engine, client):
        stream = client.generate([1], NO_TEXT)
        first = await engine.begin(anext(stream), 7)
        engine.output({7: [10]}, Event(handle=7, num_cached_tokens=16))
        assert (await first).outputs[0].token_ids == [10]
        engine.output({7: [11]}, Event(handle=7, finish_reason="length"))
        (last,) = [output async for output in stream]
        assert last.finished
        assert last.outputs[0].token_ids == [10, 11]
        assert last.num_cached_tokens == 16


async def test_counts_say_which_tokens_are_whose(endpoint: str) -> None:
    async with connected(endpoint) as (engine, client):
        requests = [asyncio.create_task(client.complete([1], NO_TEXT)) for _ in range(3)]
        for handle in (1, 2, 3):
            await engine.accept(handle)
        engine.output({2: [20, 21, 22], 3: [], 1: [10]})
        engine.output({3: [30], 1: [11, 12]})
        for handle in (1, 2, 3):
            engine.finish(handle)
        outputs = await asyncio.gather(*requests)
        assert [output.outputs[0].token_ids for output in outputs] == [
            [10, 11, 12],
            [20, 21, 22],
            [30],
        ]


REFUSALS: dict[ErrorCode, type[NanocoreError]] = {
    "invalid_request": InvalidRequestError,
    "context_length_exceeded": ContextLengthError,
    "duplicate_request_id": InvalidRequestError,
    "overloaded": EngineOverloadedError,
    "protocol_error": ProtocolError,
    "unknown_op": ProtocolError,
}


@pytest.mark.parametrize("code", REFUSALS)
async def test_an_error_for_one_request_is_its_typed_exception_and_no_one_elses(
    endpoint: str, code: ErrorCode
) -> None:
    async with connected(endpoint) as (engine, client):
        bystander = await engine.begin(client.complete([1], NO_TEXT))
        refused = asyncio.create_task(client.complete([1], NO_TEXT, request_id="r"))
        await engine.receive(Submit)
        engine.send(Error(code=code, message="because", request_id="r", retry_after_s=2.5))
        with pytest.raises(REFUSALS[code], match="because") as caught:
            await refused
        assert type(caught.value) is REFUSALS[code]
        if code == "overloaded":
            assert getattr(caught.value, "retry_after_s", None) == 2.5
        engine.finish(1)
        assert (await bystander).finished


async def test_an_id_that_is_in_use_is_refused_without_harm_to_the_first(endpoint: str) -> None:
    async with connected(endpoint) as (engine, client):
        first = await engine.begin(client.complete([1], NO_TEXT, request_id="r"))
        with pytest.raises(InvalidRequestError, match="'r' is in use"):
            await client.complete([1], NO_TEXT, request_id="r")
        engine.output({1: [10]}, Event(handle=1, finish_reason="length"))
        assert (await first).outputs[0].token_ids == [10]


@pytest.mark.parametrize("how", ["finished", "refused"])
async def test_an_id_is_free_again_after_its_request(endpoint: str, how: str) -> None:
    async with connected(endpoint) as (engine, client):
        first = await engine.begin(client.complete([1], NO_TEXT, request_id="r"))
        if how == "finished":
            engine.finish(1)
        else:
            engine.send(Error(code="overloaded", message="full", request_id="r"))
        await asyncio.gather(first, return_exceptions=True)
        second = await engine.begin(client.complete([1], NO_TEXT, request_id="r"), 2)
        engine.finish(2)
        assert (await second).finished


async def test_an_id_is_free_again_once_a_stop_string_has_ended_its_request(
    endpoint: str, tokenizer_folder: Any
) -> None:
    async with connected(endpoint, tokenizer=tokenizer_folder) as (engine, client):
        tokenizer = await client.get_tokenizer()
        params = SamplingParams(stop="b")
        first = await engine.begin(client.complete("a", params, request_id="r"))
        engine.output({1: tokenizer.encode("abc")})
        assert (await first).outputs[0].text == "a"
        await engine.receive(Abort)
        second = await engine.begin(client.complete("a", params, request_id="r"), 2)
        engine.output({}, Event(handle=1, finish_reason="abort"))
        engine.output({2: tokenizer.encode("xb")})
        assert (await second).outputs[0].text == "x"


@pytest.mark.parametrize(
    "output",
    [
        Output(handles=b"\1\0\0", tokens=b"\5\0\0\0"),
        Output(handles=b"\1\0\0\0", tokens=b"\5\0\0"),
        Output(handles=b"\1\0\0\0", tokens=b""),
        Output(handles=b"\1\0\0\0", tokens=b"\5\0\0\0", counts=b""),
        Output(handles=b"\1\0\0\0", tokens=b"\5\0\0\0", counts=b"\1"),
        Output(handles=b"\1\0\0\0", tokens=b"\5\0\0\0", counts=b"\2\0\0\0"),
    ],
)
async def test_columns_that_do_not_fit_together_end_the_session(
    endpoint: str, output: Output
) -> None:
    async with connected(endpoint) as (engine, client):
        request = await engine.begin(client.complete([1], NO_TEXT))
        engine.send(output)
        with pytest.raises(ProtocolError):
            await request
