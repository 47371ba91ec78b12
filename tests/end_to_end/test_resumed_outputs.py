"""A request that brings the outputs of an earlier run goes on as that run did, from any place.

Over the wire as it is, without the client: every feature's run is cut at every position, and what
comes for prompt and outputs is the rest of the run, to the bit. All go at once, so they are each
other's neighbours, wait for rows and preempt each other.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nanocore.client.tokenizer import Tokenizer
from nanocore.demo_model import demo_model_folder
from nanocore.protocol.messages import Submit
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.protocol.structured_outputs import StructuredOutputs
from tests.campaign import in_campaign
from tests.end_to_end.forked import engine
from tests.end_to_end.raw_requests import Answer, ask

DEMO_MODEL = demo_model_folder()
QUESTION = "Sort these words: pear apple fig plum apple"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["pear", "fig"]}, "b": {"type": "integer", "maximum": 9}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
HOT: dict[str, Any] = {"temperature": 4.0, "seed": 5}
LETTERS: dict[str, Any] = {"structured_outputs": StructuredOutputs(regex="[a-z ]+")}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, no end": {"ignore_eos": True},
    "sampled": HOT,
    "filtered": {**HOT, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "ignore_eos": True},
    "repetition penalty": {"repetition_penalty": 1.7, "ignore_eos": True},
    "frequency penalty": {"frequency_penalty": 1.5, "ignore_eos": True},
    "presence penalty": {"presence_penalty": 1.5, "ignore_eos": True},
    "min_tokens": {"min_tokens": 12},
    "min_tokens and stop ids": {**HOT, "min_tokens": 6, "stop_token_ids": [*range(200, 328)]},
    "stop ids": {**HOT, "stop_token_ids": [*range(300, 330)]},
    "bad words": {**HOT, "bad_words_token_ids": [[i] for i in range(300, 500)] + [[2, 47], [5, 6]]},
    "a bias": {**HOT, "logit_bias": [(2, 4.0), (300, 9.0), (301, 8.0), (47, -100.0)]},
    "few tokens": {**HOT, "allowed_token_ids": [2, *range(300, 340)]},
    "logprobs": {**HOT, "logprobs": 3},
    "prompt_logprobs": {"logprobs": 0, "prompt_logprobs": 2},
    "a schema": {**HOT, "structured_outputs": StructuredOutputs(json=json.dumps(SCHEMA))},
    "letters": {**HOT, **LETTERS},
    "letters, no end": {**HOT, **LETTERS, "ignore_eos": True, "logprobs": 1},
    "all at once": {
        "temperature": 2.0, "seed": 4, "top_k": 80, "top_p": 0.95, "min_tokens": 4,
        "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1,
        "logit_bias": [(300, 1.0)], "bad_words_token_ids": [[350, 351]], "logprobs": 2,
        "prompt_logprobs": 1, "stop_token_ids": [5], **LETTERS,
    },
}  # fmt: skip


def submit_of(
    request_id: str, prompt: list[int], outputs: list[int], given: dict[str, Any]
) -> Submit:
    sampling = {"temperature": 0.0, "max_tokens": 20, **given}
    return Submit(
        request_id=request_id,
        prompt_token_ids=np.array(prompt, "<i4").tobytes(),
        output_token_ids=np.array(outputs, "<i4").tobytes(),
        sampling=EngineSamplingParams(**sampling),
    )


def check_rest(whole: Answer, k: int, rest: Answer, num_prompt: int) -> None:
    """That `rest` is what `whole` has after its first k tokens."""
    assert rest.refused is None
    assert rest.tokens == whole.tokens[k:]
    assert rest.logprobs == whole.logprobs[k:]
    assert rest.why == whole.why
    if k < len(whole.tokens):
        assert rest.prompt_logprobs == whole.prompt_logprobs
        assert rest.num_cached_tokens is not None
        assert rest.num_cached_tokens <= num_prompt
    else:
        assert rest.num_cached_tokens is None


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    tokenizer = Tokenizer.from_folder(DEMO_MODEL)
    return tokenizer.encode_chat([{"role": "user", "content": QUESTION}])


@pytest.fixture(
    scope="module",
    params=["", *in_campaign("--pp 2", "--enforce-eager --no-enable-prefix-caching")],
)
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of an engine whose steps are small, and whose blocks do not suffice for its rows."""
    flags = [
        "--dtype", "float32", "--max-num-seqs", "12", "--num-gpu-blocks-override", "40",
        "--block-size", "16", "--max-num-batched-tokens", "24", *request.param.split(),
    ]  # fmt: skip
    with engine(DEMO_MODEL, *flags) as running:
        yield running.endpoint


@pytest.mark.parametrize("name", CASES)
def test_what_follows_any_cut_of_a_run_is_its_rest(
    endpoint: str, prompt: list[int], name: str
) -> None:
    given = CASES[name]
    (whole,) = asyncio.run(ask(endpoint, [submit_of("whole", prompt, [], given)]))
    assert len(whole.tokens) > 3
    cuts = [
        submit_of(f"cut {k}", prompt, whole.tokens[:k], given)
        for k in range(1, len(whole.tokens) + 1)
    ]
    for k, rest in enumerate(asyncio.run(ask(endpoint, cuts)), 1):
        check_rest(whole, k, rest, len(prompt))


def test_a_run_is_resumed_over_and_over(endpoint: str, prompt: list[int]) -> None:
    """Each time after one token more, while others keep the engine busy."""
    (whole,) = asyncio.run(ask(endpoint, [submit_of("whole", prompt, [], CASES["all at once"])]))
    outputs: list[int] = []
    while len(outputs) < len(whole.tokens):
        submits = [submit_of("it", prompt, outputs, CASES["all at once"])]
        submits += [submit_of(f"other {i}", prompt[i:], [], CASES["sampled"]) for i in range(1, 4)]
        rest, *_ = asyncio.run(ask(endpoint, submits))
        check_rest(whole, len(outputs), rest, len(prompt))
        outputs.append(rest.tokens[0])


def test_each_of_several_samples_is_resumed_as_a_request_of_its_own(
    endpoint: str, prompt: list[int]
) -> None:
    """Whose seed is the first one's and its number, modulo 2^53."""
    given, seed = {**CASES["all at once"], "prompt_logprobs": None}, 2**53 - 2
    wholes = asyncio.run(
        ask(endpoint, [submit_of("x", prompt, [], {**given, "seed": seed, "n": 3})])
    )
    assert len({tuple(whole.tokens) for whole in wholes}) == 3
    rests = [
        submit_of(f"x {i}", prompt, whole.tokens[:3], {**given, "seed": (seed + i) % 2**53})
        for i, whole in enumerate(wholes)
    ]
    for whole, rest in zip(wholes, asyncio.run(ask(endpoint, rests)), strict=True):
        check_rest(whole, 3, rest, len(prompt))


def test_ranks_go_on_from_any_cut(prompt: list[int]) -> None:
    names = ["all at once", "filtered", "a schema"]
    flags = ["--dtype", "float32", "--tp", "2", "--max-num-batched-tokens", "24"]
    with engine(DEMO_MODEL, *flags) as ranks:
        wholes = [submit_of(name, prompt, [], CASES[name]) for name in names]
        for name, whole in zip(names, asyncio.run(ask(ranks.endpoint, wholes)), strict=True):
            cuts = [
                submit_of(f"cut {k}", prompt, whole.tokens[:k], CASES[name])
                for k in range(1, len(whole.tokens) + 1)
            ]
            for k, rest in enumerate(asyncio.run(ask(ranks.endpoint, cuts)), 1):
                check_rest(whole, k, rest, len(prompt))
