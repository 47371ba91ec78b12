"""The forms that a prompt may have, and what is refused before anything is sent."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path
from typing import Any

import pytest

from nanocore.client import InvalidRequestError, SamplingParams, collect
from nanocore.client.async_client import Prompt
from nanocore.protocol.codec import unpack_int32
from nanocore.protocol.messages import Event
from tests.client.fake_engine import NO_TEXT, connected
from tests.client.running import run


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


@pytest.mark.parametrize("detokenize", [True, False])
@pytest.mark.parametrize(
    "prompt",
    [
        None,
        7,
        b"bytes",
        (1, 2),
        {},
        {"prompt": "text"},
        {"prompt_token_ids": None},
        {"prompt_token_ids": "12"},
        ["1"],
        [1.5],
        [2**31],
    ],
    ids=str,
)
def test_what_is_no_prompt_is_an_invalid_request(
    endpoint: str, tokenizer_folder: Path, prompt: Any, detokenize: bool
) -> None:
    async def scenario() -> None:
        async with connected(endpoint, tokenizer=tokenizer_folder) as (_, client):
            await client.complete(prompt, SamplingParams(detokenize=detokenize))

    with pytest.raises(InvalidRequestError):
        run(scenario(), patience_s=1.0)


@pytest.mark.parametrize(
    "options",
    [
        {"request_id": "\ud800"},
        {"priority": 2**64},
        {"cache_salt": "\ud800"},
        {"sampling_params": SamplingParams(stop_token_ids=[2**64], detokenize=False)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_cannot_be_encoded_is_an_invalid_request(
    endpoint: str, options: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with connected(endpoint) as (_, client):
            await client.complete([1], **{"sampling_params": NO_TEXT} | options)

    with pytest.raises(InvalidRequestError):
        run(scenario())
