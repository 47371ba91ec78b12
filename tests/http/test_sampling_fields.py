"""Sampling parameters as OpenAI's clients give them."""

from __future__ import annotations

from typing import Any

import pytest

from nanocore.http.dialects.sampling import SamplingFields
from nanocore.http.errors import HttpError
from nanocore.protocol.sampling import EngineSamplingParams, SamplingParams
from tests.client.running import run
from tests.http.in_process import app_of

TURNS = [{"role": "user", "content": "What is 1 + 2?"}]
PROMPT = "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n<|im_start|>assistant\n"


def read(max_tokens: int | None = None, **fields: Any) -> SamplingParams:
    return SamplingFields(**fields).sampling_params(EngineSamplingParams(), max_tokens, None)


@pytest.mark.parametrize(
    ("given", "seed"),
    [
        (0, 0),
        (2**53 - 1, 2**53 - 1),
        (2**53, 0),
        (2**63 - 1, 2**53 - 1),
        (-2, 2**53 - 2),
        (-(2**63), 0),
        (-1, None),
    ],
)
def test_a_seed_is_any_int64(given: int, seed: int | None) -> None:
    assert read(seed=given).seed == seed


@pytest.mark.parametrize("given", [2**63, -(2**63) - 1, 10**4000])
def test_other_seeds_are_refused(given: int) -> None:
    with pytest.raises(HttpError, match="int64") as refused:
        read(seed=given)
    assert (refused.value.status, refused.value.param) == (400, "seed")


def test_max_tokens_beyond_the_engines_numbers_are_as_many_as_it_has() -> None:
    assert [read(n).max_tokens for n in (2**31 - 1, 2**31, 2**63, 10**30)] == [2**31 - 1] * 4


def test_a_top_p_of_0_is_greedy() -> None:
    params = read(top_p=0, temperature=2)
    assert (params.top_p, params.temperature) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("path", "name", "body"),
    [
        ("/v1/chat/completions", "max_tokens", {"messages": TURNS}),
        ("/v1/completions", "max_tokens", {"prompt": PROMPT}),
        ("/v1/responses", "max_output_tokens", {"input": TURNS}),
        ("/v1/messages", "max_tokens", {"messages": TURNS}),
    ],
)
def test_every_dialect_takes_them(demo_endpoint: str, path: str, name: str, body: Any) -> None:
    async def send() -> Any:
        async with app_of(demo_endpoint) as (_, http):
            asked = {name: 2**40, "seed": -(2**63), "top_p": 0}
            return await http.post(path, json=body | asked)

    assert run(send()).status_code == 200


@pytest.mark.parametrize("key", [" 5", "5_0", "+5", "-5", "\u0665", "", "a", "1" * 5000])
def test_a_key_of_logit_bias_is_decimal_digits(key: str) -> None:
    assert read(logit_bias={"05": 1.0}).logit_bias == {5: 1.0}
    with pytest.raises(HttpError, match="logit_bias has the key") as refused:
        read(logit_bias={key: 1.0})
    assert refused.value.param == "logit_bias"


def test_two_keys_of_logit_bias_for_one_token_are_refused() -> None:
    with pytest.raises(HttpError, match="two keys for one token id") as refused:
        read(logit_bias={"5": 1.0, "05": 2.0})
    assert refused.value.param == "logit_bias"
