"""The forms that a prompt may have, and what is refused before anything is sent."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path

import pytest

from nanocore.client import InvalidRequestError, SamplingParams, collect
from nanocore.client.async_client import Prompt
from nanocore.protocol.codec import unpack_int32
from nanocore.protocol.messages import Event
from tests.client.fake_engine import NO_TEXT, connected


@pytest.mark.parametrize("prompt", [[5, 6], array("i", [5, 6]), {"prompt_token_ids": [5, 6]}])
async def test_token_ids_are_sent_as_they_are(endpoint: str, prompt: Prompt) -> None:
    async with connected(endpoint) as (engine, client):
        request = asyncio.create_task(client.complete(prompt, NO_TEXT))
        submit = await engine.accept()
        assert unpack_int32(submit.prompt_token_ids).tolist() == [5, 6]
        engine.finish()
        output = await request
        assert output.prompt is None
        assert list(output.prompt_token_ids) == [5, 6]


async def test_text_is_tokenized_and_the_answer_is_text(
    endpoint: str, tokenizer_folder: Path
) -> None:
    async with connected(endpoint, tokenizer=tokenizer_folder) as (engine, client):
        request = asyncio.create_task(client.complete("é"))
        submit = await engine.accept()
        tokenizer = await client.get_tokenizer()
        ids = tokenizer.encode("é")
        assert unpack_int32(submit.prompt_token_ids).tolist() == ids
        engine.output({1: tokenizer.encode("中")}, Event(handle=1, finish_reason="length"))
        output = await request
        assert (output.prompt, output.prompt_token_ids) == ("é", ids)
        assert output.outputs[0].text == "中"


async def test_a_conversation_is_sent_by_the_models_template(
    endpoint: str, tokenizer_folder: Path
) -> None:
    async with connected(endpoint, tokenizer=tokenizer_folder) as (engine, client):
        answer = client.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=1))
        reading = asyncio.create_task(collect(answer))
        submit = await engine.accept()
        expected = (await client.get_tokenizer()).encode("user: hi\nassistant: ")
        assert unpack_int32(submit.prompt_token_ids).tolist() == expected
        assert submit.sampling.max_tokens == 1
        engine.output({1: [65]}, Event(handle=1, finish_reason="length"))
        assert [one.finish_reason for one in await reading] == ["length"]


async def test_text_without_the_models_files_is_refused_with_the_remedy(endpoint: str) -> None:
    async with connected(endpoint) as (_, client):
        with pytest.raises(InvalidRequestError, match="pass token ids instead of text"):
            await client.complete("text")
        with pytest.raises(InvalidRequestError, match="pass token ids instead of text"):
            await client.complete([1])
