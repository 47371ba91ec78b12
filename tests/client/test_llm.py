"""The synchronous SDK, whole batches and step by step, with a fake engine."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest

from nanocore.client import (
    LLM,
    ClientStateError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    SamplingParams,
)
from nanocore.protocol.codec import unpack_int32
from nanocore.protocol.messages import Abort, Control, Error, Event, Reply, Submit
from tests.client.fake_engine import MAX_NUM_SEQS, NO_TEXT, served


def _generate(llm: LLM, *args: Any) -> asyncio.Task[list[Any]]:
    return asyncio.create_task(asyncio.to_thread(llm.generate, *args, use_tqdm=False))


async def test_results_come_in_the_order_of_the_prompts(joining: str) -> None:
    async with served(joining) as (engine, llm):
        generating = _generate(llm, [[1], [2], [3]], NO_TEXT)
        for handle in (1, 2, 3):
            submit = await engine.accept(handle)
            assert unpack_int32(submit.prompt_token_ids).tolist() == [handle]
        for handle in (3, 1, 2):
            event = Event(handle=handle, finish_reason="length")
            engine.output({handle: [10 * handle]}, event)
        outputs = await generating
        assert [output.outputs[0].token_ids for output in outputs] == [[10], [20], [30]]


@pytest.mark.parametrize(
    "prompt", ["one", [1, 2], array("i", [1, 2]), {"prompt_token_ids": [1, 2]}]
)
async def test_one_prompt_of_any_form_is_a_batch_of_one(joining: str, prompt: Any) -> None:
    async with served(joining) as (engine, llm):
        generating = _generate(llm, prompt)
        await engine.accept()
        engine.finish()
        assert len(await generating) == 1


@pytest.mark.parametrize("prompts", [None, 7, b"bytes", [None], [b"bytes"], [[1], None]], ids=repr)
async def test_what_are_no_prompts_is_refused(joining: str, prompts: Any) -> None:
    async with served(joining) as (_, llm):
        with pytest.raises(InvalidRequestError, match=r"a prompt is|prompts are"):
            await _generate(llm, prompts, NO_TEXT)


@pytest.mark.parametrize("conversations", [None, 7, "hi", {"role": "user", "content": "hi"}])
async def test_what_are_no_conversations_is_refused(joining: str, conversations: Any) -> None:
    async with served(joining) as (_, llm):
        with pytest.raises(InvalidRequestError, match="a conversation is a list of messages"):
            await asyncio.to_thread(llm.chat, conversations, use_tqdm=False)


@pytest.mark.parametrize("params", ["greedy", 5, {"max_tokens": 1}, [None, "greedy"]], ids=repr)
async def test_what_are_no_sampling_params_is_refused(joining: str, params: Any) -> None:
    async with served(joining) as (_, llm):
        with pytest.raises(InvalidRequestError, match="sampling_params are"):
            await _generate(llm, [[1], [2]], params)


async def test_closing_ends_the_calls_of_other_threads(joining: str) -> None:
    async with served(joining) as (engine, llm):
        generating = _generate(llm, [[1], [2]], NO_TEXT)
        await engine.accept(1)
        await asyncio.to_thread(llm.close)
        with pytest.raises(ClientStateError, match="closed"):
            await generating


async def test_no_prompts_have_no_results(joining: str) -> None:
    async with served(joining) as (_, llm):
        assert await _generate(llm, []) == []


async def test_each_prompt_may_have_its_own_parameters(joining: str) -> None:
    async with served(joining) as (engine, llm):
        params = [SamplingParams(max_tokens=n, detokenize=False) for n in (5, 6)]
        generating = _generate(llm, [[1], [2]], params)
        assert [(await engine.accept(n)).sampling.max_tokens for n in (5, 6)] == [5, 6]
        engine.finish(5)
        engine.finish(6)
        await generating
        with pytest.raises(InvalidRequestError, match="1 prompts and 2 sampling_params"):
            await _generate(llm, [[1]], params)


@pytest.mark.parametrize("batch", [True, False])
async def test_chat_takes_one_conversation_or_several(joining: str, batch: bool) -> None:
    conversation = [{"role": "user", "content": "hi"}]

    async with served(joining) as (engine, llm):
        conversations: Any = [conversation] if batch else conversation
        chatting = asyncio.create_task(asyncio.to_thread(llm.chat, conversations, use_tqdm=False))
        ids = unpack_int32((await engine.accept()).prompt_token_ids).tolist()
        assert llm.get_tokenizer().decode(ids) == "user: hi\nassistant: "
        engine.finish()
        assert len(await chatting) == 1


async def test_only_some_requests_are_in_flight_at_once(joining: str) -> None:
    limit = 4 * MAX_NUM_SEQS

    async with served(joining) as (engine, llm):
        generating = _generate(llm, [[1]] * (limit + 1), NO_TEXT)
        for handle in range(limit):
            await engine.accept(handle)
        marker = asyncio.create_task(asyncio.to_thread(llm.reset_prefix_cache))
        control = await engine.receive(Control)  # and not one more SUBMIT
        engine.send(Reply(call_id=control.call_id))
        await marker
        engine.finish(0)
        await engine.accept(limit)
        for handle in range(1, limit + 1):
            engine.finish(handle)
        await generating


async def test_the_first_error_is_raised_as_itself_and_the_others_are_aborted(joining: str) -> None:
    async with served(joining) as (engine, llm):
        generating = _generate(llm, [[1], [2]], NO_TEXT)
        refused, running = await engine.receive(Submit), await engine.accept(2)
        error = Error(code="context_length_exceeded", message="long", request_id=refused.request_id)
        engine.send(error)
        with pytest.raises(ContextLengthError, match="long"):
            await generating
        assert (await engine.receive(Abort)).request_ids == [running.request_id]


async def test_a_request_that_an_overloaded_engine_refuses_is_submitted_again(joining: str) -> None:
    async with served(joining) as (engine, llm):
        generating = _generate(llm, [[1], [2]], NO_TEXT)
        await engine.accept(1)
        prompts = []
        for _ in range(3):
            refused = await engine.receive(Submit)
            prompts.append(unpack_int32(refused.prompt_token_ids).tolist())
            engine.send(
                Error(
                    code="overloaded",
                    message="the queue is full",
                    request_id=refused.request_id,
                    retry_after_s=0.001,
                )
            )
        engine.output({1: [10]}, Event(handle=1, finish_reason="length"))
        await engine.accept(2)
        engine.output({2: [20]}, Event(handle=2, finish_reason="length"))
        assert prompts == [[2]] * 3
        assert [output.outputs[0].token_ids for output in await generating] == [[10], [20]]


def test_a_failed_start_raises_its_cause_and_leaves_nothing(joining: str) -> None:
    with pytest.raises(EngineDeadError):
        LLM("nobody")


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
        generating = await engine.begin(
            asyncio.to_thread(llm.generate, [[2]], NO_TEXT, use_tqdm=False), 2
        )
        engine.output({1: [10], 2: [20]}, Event(handle=2, finish_reason="length"))
        assert (await generating)[0].outputs[0].token_ids == [20]
        await _call(llm.close)


@pytest.mark.usefixtures("forked_launches")
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


async def test_an_abort_ends_a_step_of_another_thread_that_waits_for_nothing_else(
    joining: str,
) -> None:
    async with served(joining) as (engine, llm):
        name = await _call(llm.add_request, [1], NO_TEXT)
        await engine.accept(1)
        step = asyncio.create_task(_call(llm.step))
        await _call(llm.abort, name)
        assert await step == []
