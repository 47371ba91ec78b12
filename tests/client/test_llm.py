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
