"""Structured outputs in the SDK: what is asked for, and answers that come later than others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from nanocore.client import (
    AsyncEngineClient,
    InvalidRequestError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from nanocore.protocol.messages import Abort, Accepted, Error, Event, Submit, Welcome
from nanocore.protocol.structured_outputs import StructuredOutputs
from tests.client.fake_engine import NO_TEXT, FakeEngine, connected, served, welcome_message

SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}}
WANTED = StructuredOutputsParams(json=SCHEMA)
STRUCTURED = SamplingParams(structured_outputs=WANTED, detokenize=False)
ABLE = replace(welcome_message(), capabilities=["structured_outputs"])


class Car:
    """As a pydantic model: its class says what its instances' JSON is."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"title": cls.__name__, **SCHEMA}


async def last_of(outputs: Any) -> RequestOutput:
    return [output async for output in outputs][-1]


CALLS: dict[str, Callable[[AsyncEngineClient], Any]] = {
    "generate": lambda client: last_of(client.generate([1], STRUCTURED)),
    "complete": lambda client: client.complete([1], STRUCTURED),
}


@pytest.mark.parametrize("name", CALLS)
async def test_every_way_to_ask_sends_what_was_asked_for(
    name: str, endpoint: str, tokenizer_folder: Any
) -> None:
    async with connected(endpoint, ABLE, tokenizer=tokenizer_folder) as (engine, client):
        request = asyncio.create_task(CALLS[name](client))
        sampling = (await engine.accept()).sampling
        text = '{"type":"object","properties":{"sum":{"type":"integer"}}}'
        assert sampling.structured_outputs == StructuredOutputs(json=text)
        engine.finish(1, "stop")
        assert (await request).outputs[0].finish_reason == "stop"


async def test_so_does_the_synchronous_client(joining: str) -> None:
    async with served(joining, ABLE) as (engine, llm):
        call = asyncio.create_task(asyncio.to_thread(llm.generate, [1], STRUCTURED))
        submit = await engine.accept()
        assert submit.sampling.structured_outputs == WANTED.for_engine()
        engine.finish()
        await call


def test_a_class_that_knows_its_schema_is_asked_for_it() -> None:
    params = StructuredOutputsParams(json=Car)
    assert params.json == Car.model_json_schema()
    assert json.loads(params.for_engine().json or "") == {"title": "Car", **SCHEMA}


@pytest.mark.parametrize("value", [int, Car(), [SCHEMA]], ids=["class", "instance", "list"])
def test_what_knows_no_schema_is_refused(value: Any) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"structured_outputs\.json must be true, false, a string or"
    ):
        StructuredOutputsParams(json=value)


async def test_an_engine_that_is_too_old_is_not_asked(endpoint: str) -> None:
    said = r"^structured_outputs .*1\.6, .* speaks 1\.5: leave it"

    async with connected(endpoint, replace(ABLE, protocol=(1, 5))) as (engine, client):
        for call in (CALLS["complete"], CALLS["generate"]):
            with pytest.raises(InvalidRequestError, match=said):
                await call(client)
        request = asyncio.create_task(client.complete([1], NO_TEXT))
        assert (await engine.accept()).sampling.structured_outputs is None
        engine.finish()
        await request


@pytest.mark.parametrize("welcome", [ABLE, welcome_message()], ids=["able", "without"])
async def test_what_the_engine_cannot_compile_is_said_in_its_words(
    endpoint: str, welcome: Welcome
) -> None:
    async with connected(endpoint, welcome) as (engine, client):
        refused = asyncio.create_task(client.complete([1], STRUCTURED, request_id="r"))
        await engine.receive(Submit)
        engine.send(Error(code="invalid_request", message="at $.type: ?", request_id="r"))
        with pytest.raises(InvalidRequestError, match=r"at \$\.type"):
            await refused
        again = await engine.begin(client.complete([1], STRUCTURED, request_id="r"))
        engine.output({1: [10]}, Event(handle=1, finish_reason="error", message="too complex"))
        answer = (await again).outputs[0]
        assert (answer.finish_reason, answer.message) == ("error", "too complex")
        assert answer.token_ids == [10]


async def test_later_requests_may_be_accepted_served_and_ended_before(endpoint: str) -> None:
    several = replace(STRUCTURED, n=2)

    async with connected(endpoint, ABLE) as (engine, client):
        waiting = asyncio.create_task(client.complete([1], several, request_id="late"))
        await engine.receive(Submit)
        reading = await engine.begin(last_of(client.generate([2], NO_TEXT, "early")), 3)
        engine.output({3: [30]})
        engine.output({3: [31]}, Event(handle=3, finish_reason="length"))
        assert (await reading).outputs[0].token_ids == [30, 31]
        assert not waiting.done()
        engine.send(Accepted(request_id="late", handle=1, seed=0))
        ends = [Event(handle=handle, finish_reason="stop") for handle in (1, 2)]
        engine.output({2: [20], 1: [10]}, *ends)
        assert [sample.token_ids for sample in (await waiting).outputs] == [[10], [20]]


async def _leave(client: AsyncEngineClient, request: asyncio.Task[RequestOutput]) -> None:
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request


async def _abort(client: AsyncEngineClient, request: asyncio.Task[RequestOutput]) -> None:
    await client.abort("r")


def _accept_and_end(engine: FakeEngine) -> None:
    engine.send(Accepted(request_id="r", handle=1, seed=0))
    engine.finish(1, "abort")


def _refuse(engine: FakeEngine) -> None:
    engine.send(Error(code="invalid_request", message="no schema", request_id="r"))


@pytest.mark.parametrize("answer", [_accept_and_end, _refuse])
@pytest.mark.parametrize("end", [_leave, _abort])
async def test_a_request_can_be_ended_while_its_schema_is_compiled(
    endpoint: str, end: Any, answer: Callable[[FakeEngine], None]
) -> None:
    async with connected(endpoint, ABLE) as (engine, client):
        request = asyncio.create_task(last_of(client.generate([1], STRUCTURED, "r")))
        await engine.receive(Submit)
        await end(client, request)
        assert (await engine.receive(Abort)).request_ids == ["r"]
        with pytest.raises(InvalidRequestError, match="'r' is in use"):
            await client.complete([1], NO_TEXT, request_id="r")
        answer(engine)
        bystander = await engine.begin(client.complete([2], NO_TEXT), 2)
        engine.output({2: [20]}, Event(handle=2, finish_reason="length"))
        assert (await bystander).outputs[0].token_ids == [20]
        if end is _abort and answer is _refuse:
            with pytest.raises(InvalidRequestError, match="no schema"):
                await request
        elif end is _abort:
            assert (await request).outputs[0].finish_reason == "abort"
        again = await engine.begin(client.complete([1], NO_TEXT, request_id="r"), 3)
        engine.finish(3)
        assert (await again).finished
