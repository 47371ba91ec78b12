"""LLM.add_request, step, has_unfinished_requests and abort: with a fake engine and a real one."""

from __future__ import annotations

import asyncio
from typing import Any

from nanocore.client import LLM, ContextLengthError, SamplingParams
from nanocore.client.stepwise import StepwiseRequests
from nanocore.protocol.messages import Abort, Error, Event, Submit
from tests.client.fake_engine import NO_TEXT, connected
from tests.client.served_llm import served


async def _call(function: Any, *args: Any) -> Any:
    return await asyncio.to_thread(function, *args)


def _brief(outputs: list[Any]) -> list[tuple[str, list[int], bool]]:
    return [(o.request_id, o.outputs[0].token_ids, o.finished) for o in outputs]


async def test_a_step_gives_what_has_changed_in_the_order_of_arrival(joining: str) -> None:
    async with served(joining) as (engine, llm):
        first = await _call(llm.add_request, [1], NO_TEXT)
        second = await _call(llm.add_request, [2], NO_TEXT)
        third = await _call(llm.add_request, [3], NO_TEXT)
        for handle in (1, 2, 3):
            await engine.accept(handle)
        engine.output({3: [30], 1: [10]})
        assert _brief(await _call(llm.step)) == [(first, [10], False), (third, [30], False)]
        engine.output({2: [20, 21]}, Event(handle=2, finish_reason="length"))
        assert _brief(await _call(llm.step)) == [(second, [20, 21], True)]
        assert llm.has_unfinished_requests()
        end = [Event(handle=handle, finish_reason="length") for handle in (1, 3)]
        engine.output({1: [11], 3: [31]}, *end)
        assert _brief(await _call(llm.step)) == [(first, [10, 11], True), (third, [30, 31], True)]
        assert not llm.has_unfinished_requests()
        assert await _call(llm.step) == []


async def test_a_failed_request_is_raised_by_a_step_of_its_own(joining: str) -> None:
    async with served(joining) as (engine, llm):
        bad = await _call(llm.add_request, [1], NO_TEXT)
        good = await _call(llm.add_request, [2], NO_TEXT)
        refused = await engine.receive(Submit)
        await engine.accept(2)
        error = Error(code="context_length_exceeded", message="long", request_id=bad)
        assert refused.request_id == bad
        engine.send(error)
        engine.output({2: [20]}, Event(handle=2, finish_reason="length"))
        seen = []
        while llm.has_unfinished_requests():
            try:
                seen += _brief(await _call(llm.step))
            except ContextLengthError as caught:
                seen.append((caught.request_id or "", [], False))
        assert sorted(seen) == [(bad, [], False), (good, [20], True)]


async def test_an_aborted_request_is_not_reported_any_more(joining: str) -> None:
    async with served(joining) as (engine, llm):
        left = await _call(llm.add_request, [1], NO_TEXT)
        kept = await _call(llm.add_request, [2], NO_TEXT)
        await engine.accept(1)
        await engine.accept(2)
        engine.output({1: [10], 2: [20]})
        assert len(await _call(llm.step)) == 2
        engine.output({1: [11]})
        await _call(llm.abort, left)
        await _call(llm.abort, left)
        assert (await engine.receive(Abort)).request_ids == [left]
        engine.output({2: [21]}, Event(handle=2, finish_reason="length"))
        assert _brief(await _call(llm.step)) == [(kept, [20, 21], True)]
        assert not llm.has_unfinished_requests()


async def test_an_overloaded_engine_is_asked_again(joining: str) -> None:
    async with served(joining) as (engine, llm):
        request_id = await _call(llm.add_request, [1], NO_TEXT)
        await engine.receive(Submit)
        busy = Error(code="overloaded", message="full", request_id=request_id, retry_after_s=0.001)
        engine.send(busy)
        await engine.accept(7)
        engine.output({7: [10]}, Event(handle=7, finish_reason="length"))
        assert _brief(await _call(llm.step)) == [(request_id, [10], True)]


async def test_generate_can_be_used_beside_it_and_closing_ends_what_is_unfinished(
    joining: str,
) -> None:
    async with served(joining) as (engine, llm):
        await _call(llm.add_request, [1], NO_TEXT)
        await engine.accept(1)
        generating = asyncio.create_task(
            asyncio.to_thread(llm.generate, [[2]], NO_TEXT, use_tqdm=False)
        )
        await engine.accept(2)
        engine.output({1: [10], 2: [20]}, Event(handle=2, finish_reason="length"))
        assert (await generating)[0].outputs[0].token_ids == [20]
        await _call(llm.close)


def test_the_loop_of_a_reader_of_small_engines_works_with_a_real_one() -> None:
    prompts = ["Sorted:", "Reverse:"]
    params = SamplingParams(temperature=0, max_tokens=6)
    with LLM() as llm:
        ids = [llm.add_request(prompt, params) for prompt in prompts]
        texts, done = dict.fromkeys(ids, ""), {}
        while llm.has_unfinished_requests():
            for output in llm.step():
                texts[output.request_id] += output.outputs[0].delta
                if output.finished:
                    done[output.request_id] = output.outputs[0].text
        expected = [o.outputs[0].text for o in llm.generate(prompts, params, use_tqdm=False)]
    assert [done[request_id] for request_id in ids] == expected
    assert texts == done


async def test_what_an_interrupted_step_took_is_what_the_next_one_returns(endpoint: str) -> None:
    async with connected(endpoint) as (engine, client):
        requests = StepwiseRequests(client)
        name = await requests.add([1], NO_TEXT)
        await engine.accept(1)
        engine.output({1: [10]}, Event(handle=1, finish_reason="length"))
        expected = [(name, [10], True)]
        assert _brief(await requests.step()) == expected
        assert requests.are_unfinished, "nobody has said that they came"
        assert _brief(await requests.step()) == expected
        requests.received()
        assert not requests.are_unfinished
        assert await requests.step() == []


async def test_an_abort_ends_a_step_of_another_thread_that_waits_for_nothing_else(
    joining: str,
) -> None:
    async with served(joining) as (engine, llm):
        name = await _call(llm.add_request, [1], NO_TEXT)
        await engine.accept(1)
        step = asyncio.create_task(_call(llm.step))
        await _call(llm.abort, name)
        assert await step == []
