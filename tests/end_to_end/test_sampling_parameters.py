"""Every sampling parameter, and every two that can meet in a request, against the oracle.

All requests run together in one engine, so they are neighbours of each other, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import msgspec
import numpy as np
import pytest

from nanocore.client import (
    AsyncEngineClient,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from nanocore.client.token_texts import REPLACEMENT
from nanocore.client.tokenizer import Tokenizer
from nanocore.demo_model import demo_model_folder
from tests.campaign import in_campaign
from tests.end_to_end.forked import engine
from tests.end_to_end.sampling_oracle import LETTERS, Oracle

DEMO_MODEL = demo_model_folder()
FLAGS = (
    "--max-num-batched-tokens 24",
    "--tp 2",
    "--pp 2",
    "--enforce-eager --no-enable-prefix-caching",
)
PROMPTS = (
    "Sort these words: pear apple fig plum apple",
    "The quick brown fox jumps over the lazy dog, and the dog",
)
BASE: dict[str, Any] = {"temperature": 1.3, "max_tokens": 12, "ignore_eos": True}
VALUES: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 0.8,
    "top_k": 7,
    "min_p": 0.05,
    "max_tokens": 7,
    "stop_token_ids": list(range(200, 320)),
    "ignore_eos": False,
    "skip_reading_prefix_cache": True,
    "n": 3,
    "min_tokens": 5,
    "presence_penalty": 1.5,
    "frequency_penalty": -1.0,
    "repetition_penalty": 1.4,
    "allowed_token_ids": [0, 2, *range(40, 900, 7)],
    "logprobs": 3,
    "prompt_logprobs": 2,
    "logit_bias": {2: 4.0, 300: 5.0, 301: 5.0, 47: -100.0, 100: 6.0},
    "bad_words": ["e", "the", "apple fig", "o"],
    "structured_outputs": StructuredOutputsParams(regex=LETTERS),
    "stop": ["e", "zz"],
}


def kwargs(names: tuple[str, ...]) -> dict[str, Any]:
    return BASE | {name: VALUES[name] for name in names}


def singles() -> list[tuple[str, ...]]:
    return [(), *((name,) for name in VALUES)]


def pairs() -> list[tuple[str, ...]]:
    return [*combinations(VALUES, 2)]


def everything() -> dict[str, Any]:
    """As many at once as make sense together."""
    return BASE | {name: value for name, value in VALUES.items() if name != "temperature"}


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(DEMO_MODEL)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(DEMO_MODEL)


@pytest.fixture(scope="module", params=["", *in_campaign(*FLAGS)])
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of an engine with so many rows that some requests wait, and blocks that do not suffice."""
    flags = [
        "--dtype", "float32", "--max-num-seqs", "20", "--num-gpu-blocks-override", "60",
        "--block-size", "16", *request.param.split(),
    ]  # fmt: skip
    with engine(DEMO_MODEL, *flags) as running:
        yield running.endpoint


Answer = tuple[list[int], SamplingParams, RequestOutput]


def answers(endpoint: str, requests: list[dict[str, Any]]) -> list[Answer]:
    """Of all requests together, on one prompt after the other."""

    async def run() -> list[Answer]:
        async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:

            async def answer(index: int, given: dict[str, Any]) -> Answer:
                params = SamplingParams(seed=1000 + index, **given)
                output = await client.complete(PROMPTS[index % len(PROMPTS)], params)
                return [*output.prompt_token_ids], params, output

            tasks = [answer(index, given) for index, given in enumerate(requests)]
            return await asyncio.gather(*tasks)

    return asyncio.run(run())


def check(oracle: Oracle, tokenizer: Tokenizer, answer: Answer) -> None:
    """That an answer is what its parameters ask for: tokens, ends, text and log probabilities."""
    prompt, params, output = answer
    assert output.finished
    assert [sample.index for sample in output.outputs] == list(range(params.n))
    bad_words = tokenizer_ids(tokenizer, params.bad_words)
    for index, sample in enumerate(output.outputs):
        assert params.seed is not None
        sampling = msgspec.structs.replace(
            params.for_engine(bad_words), seed=params.seed + index, n=1
        )
        judged = oracle.judge(prompt, sample.token_ids, sampling)
        judged.check_tokens()
        reason = judged.finish_reason()
        if isinstance(sample.stop_reason, str):
            assert sample.stop_reason in params.stop_strings
            assert sample.finish_reason == "stop"
            # Text before min_tokens may hold it.
            assert params.min_tokens or sample.stop_reason not in sample.text
            assert len(sample.token_ids) > params.min_tokens
        else:
            assert sample.finish_reason == reason is not None
            ends_by_id = reason == "stop"
            shown = sample.token_ids[: len(sample.token_ids) - ends_by_id]
            # A character that is incomplete at the end is left out.
            whole = tokenizer.decode(shown)
            assert sample.text in (whole, whole.removesuffix(REPLACEMENT))
        if params.logprobs is None:
            assert sample.logprobs is None
            continue
        assert sample.logprobs is not None
        assert len(sample.logprobs) == len(sample.token_ids)
        for i, (token_id, found) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
            expected = judged.logprobs(len(prompt) + i)
            check_logprobs(tokenizer, expected, token_id, found, params.logprobs)
    if params.prompt_logprobs is None:
        assert output.prompt_logprobs is None
        return
    judged = oracle.judge(prompt, [], params.for_engine(bad_words))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt)
    for i in range(1, len(prompt)):
        found = output.prompt_logprobs[i]
        assert found is not None
        check_logprobs(tokenizer, judged.logprobs(i), prompt[i], found, params.prompt_logprobs)


def check_logprobs(
    tokenizer: Tokenizer, expected: np.ndarray, token_id: int, found: dict[int, Any], num_top: int
) -> None:
    order = np.argsort(-expected, kind="stable")
    rank = int((order == token_id).argmax()) + 1
    assert [*found] == [token_id, *(t for t in order[:num_top].tolist() if t != token_id)]
    for i, (candidate, said) in enumerate(found.items()):
        assert said.logprob == pytest.approx(expected[candidate], abs=1e-3)
        if i == 0:
            assert said.rank == rank
        assert said.decoded_token == tokenizer.token_text(candidate).text
        assert bytes(said.bytes) == tokenizer.token_text(candidate).bytes


def tokenizer_ids(tokenizer: Tokenizer, words: list[str]) -> list[list[int]]:
    """Sequences that a word is never to be written by."""
    found: list[list[int]] = []
    for word in words:
        plain = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False)
        found.append(plain)
        if spaced[-len(plain) :] != plain:
            found.append(spaced)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("names", [singles(), *in_campaign(pairs())], ids=["singles", "pairs"])
def test_each_parameter_and_each_two_of_them_do_what_they_say(
    endpoint: str, oracle: Oracle, tokenizer: Tokenizer, names: list[tuple[str, ...]]
) -> None:
    for answer in answers(endpoint, [*map(kwargs, names), everything()]):
        check(oracle, tokenizer, answer)


@pytest.mark.timeout(300)
def test_what_a_request_gets_does_not_depend_on_its_neighbours(endpoint: str) -> None:
    requests = [kwargs((name,)) for name in VALUES] + [everything(), everything()]
    together = answers(endpoint, requests)
    for index, given in enumerate(requests):
        if index % 5 and "n" not in given:  # a sample of them, and all with several samples
            continue
        padded: list[dict[str, Any]] = [BASE | {"max_tokens": 1}] * index + [given]
        (_, _, alone), (_, _, output) = answers(endpoint, padded)[-1], together[index]
        assert [said(sample) for sample in alone.outputs] == [said(s) for s in output.outputs]
        assert alone.prompt_logprobs == output.prompt_logprobs


def said(sample: Any) -> tuple[Any, ...]:
    """All that a sample says, log probabilities to the bit."""
    return sample.token_ids, sample.text, sample.finish_reason, sample.stop_reason, sample.logprobs
