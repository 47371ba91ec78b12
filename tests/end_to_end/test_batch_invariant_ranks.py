"""--batch-invariant on several ranks: what a request says alone, it says in a crowd, to the bit.

What is compared are log probabilities of tokens and of the prompt, as they come over the wire. The
crowd is computed in chunks, finds prefixes and preempts, for its blocks do not suffice.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from nanocore.client import AsyncEngineClient
from nanocore.demo_model import demo_model_folder
from nanocore.protocol.messages import Submit
from nanocore.protocol.sampling import EngineSamplingParams
from tests.end_to_end.forked import engine
from tests.end_to_end.raw_requests import ask

pytestmark = pytest.mark.campaign

DEMO_MODEL = demo_model_folder()
NUM_REQUESTS = 24


def submits() -> list[Submit]:
    """Of 1 to 90 prompt tokens, of which every third has the first 40 in common."""
    rng = np.random.default_rng(11)
    common = rng.integers(300, 900, 40)
    made = []
    for i in range(NUM_REQUESTS):
        prompt = rng.integers(300, 900, 1 + 89 * i // NUM_REQUESTS)
        if i % 3 == 0:
            prompt = np.concatenate([common, prompt])
        params = EngineSamplingParams(
            temperature=2.0,
            seed=i,
            max_tokens=16,
            ignore_eos=True,
            logprobs=2,
            prompt_logprobs=1 if i % 2 else None,
        )
        tokens = prompt.astype("<i4").tobytes()
        made.append(Submit(request_id=f"r{i}", prompt_token_ids=tokens, sampling=params))
    return made


async def metric(endpoint: str, name: str) -> float:
    async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
        metrics = await client.metrics()
        return sum(s.value for m in metrics if m.name == name for s in m.samples)


async def fingerprint(endpoint: str) -> str | None:
    async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
        return client.model_card.numerics_fingerprint


@pytest.mark.parametrize("ranks", ["--tp 2", "--pp 2"])
def test_ranks_say_the_same_bits_alone_and_in_a_crowd(ranks: str) -> None:
    flags = [
        *ranks.split(), "--batch-invariant", "--max-num-seqs", "16", "--block-size", "16",
        "--num-gpu-blocks-override", "40", "--max-num-batched-tokens", "48",
    ]  # fmt: skip
    with engine(DEMO_MODEL, *flags) as running:
        assert asyncio.run(fingerprint(running.endpoint)) is not None
        alone = [asyncio.run(ask(running.endpoint, [one]))[0] for one in submits()]
        before = asyncio.run(metric(running.endpoint, "num_preemptions"))
        crowd = asyncio.run(ask(running.endpoint, submits()))
        assert asyncio.run(metric(running.endpoint, "num_preemptions")) > before
    for one, other in zip(alone, crowd, strict=True):
        assert other.refused is None
        assert other.tokens == one.tokens
        assert other.logprobs == one.logprobs
        assert other.prompt_logprobs == one.prompt_logprobs
