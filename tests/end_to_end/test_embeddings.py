"""Embeddings from the model to the user: transformers', and the same bits whatever else runs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from nanocore.client import AsyncEngineClient, EmbeddingOutput, NanocoreError, SamplingParams
from nanocore.demo_model import demo_model_folder
from nanocore.protocol.sampling import Pooling
from tests.campaign import in_campaign
from tests.end_to_end.forked import engine

DEMO_MODEL = demo_model_folder()
FLAGS = ("--tp 2", "--pp 2", "--tp 2 --pp 2", "--no-enable-prefix-caching")
POOLINGS: tuple[Pooling, ...] = ("last", "mean")
PROMPTS = [[(7 * i + j * j) % 900 + 10 for j in range(length)]
           for i, length in enumerate([1, 5, 24, 25, 70, 130, 200])]  # fmt: skip
LONG = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module", params=["", *in_campaign(*FLAGS)])
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of an engine whose prompts come in chunks, and whose blocks do not suffice for all."""
    flags = [
        "--dtype", "float32", "--max-num-seqs", "12", "--max-num-batched-tokens", "24",
        "--num-gpu-blocks-override", "40", "--block-size", "16", *request.param.split(),
    ]  # fmt: skip
    with engine(DEMO_MODEL, *flags) as running:
        yield running.endpoint


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, Pooling], np.ndarray]:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    found: dict[tuple[int, Pooling], np.ndarray] = {}
    for i, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            hidden_TE = model(torch.tensor([prompt])).last_hidden_state[0]
        found[i, "last"], found[i, "mean"] = hidden_TE[-1].numpy(), hidden_TE.mean(dim=0).numpy()
    return found


async def all_together(
    client: AsyncEngineClient, normalize: bool = False
) -> dict[tuple[int, Pooling], EmbeddingOutput]:
    keys = [(i, pooling) for i in range(len(PROMPTS)) for pooling in POOLINGS]
    calls = [client.embed(PROMPTS[i], pooling, normalize) for i, pooling in keys]
    return dict(zip(keys, await asyncio.gather(*calls), strict=True))


def test_in_a_crowd_they_are_transformers_and_alone_they_are_the_same_bits(
    endpoint: str, expected: dict[tuple[int, Pooling], np.ndarray]
) -> None:
    async def scenario() -> None:
        async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
            before = await client.stats()
            others = [asyncio.create_task(client.complete([n, 5, 6], LONG)) for n in range(9)]
            crowd = await all_together(client)
            tokens = [(await other).outputs[0].num_tokens for other in others]
            assert tokens == [120] * 9
            after = await client.stats()
            assert after.num_preemptions > before.num_preemptions
            assert after.generation_tokens == before.generation_tokens + 9 * 120
            for (i, pooling), output in crowd.items():
                found, right = np.array(output.embedding), expected[i, pooling]
                assert len(found) == client.model_card.hidden_size
                assert np.abs(found - right).max() <= 1e-4 * np.abs(right).max()
                alone = await client.embed(PROMPTS[i], pooling, normalize=False)
                assert alone.embedding == output.embedding
                assert pooling == "last" or alone.num_cached_tokens == 0

    asyncio.run(asyncio.wait_for(scenario(), 100))


def test_a_cached_prefix_changes_no_bit_of_the_last_tokens(endpoint: str) -> None:
    async def scenario() -> None:
        async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
            await client.reset_prefix_cache()
            first, again = [await client.embed(PROMPTS[-1]) for _ in range(2)]
            salted = await client.embed(PROMPTS[-1], cache_salt="other")
            assert (first.num_cached_tokens, salted.num_cached_tokens) == (0, 0)
            is_cached = "prefix_caching" in client._entered().welcome.capabilities
            assert again.num_cached_tokens == (192 if is_cached else 0)
            assert first.embedding == again.embedding == salted.embedding
            assert math.hypot(*first.embedding) == pytest.approx(1.0, abs=1e-6)

    asyncio.run(asyncio.wait_for(scenario(), 100))


def test_an_abort_ends_one_and_the_engine_goes_on(endpoint: str) -> None:
    async def scenario() -> None:
        async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
            await client.pause()
            asked = asyncio.create_task(client.embed(PROMPTS[-1], "mean", request_id="mine"))
            while (await client.stats()).num_requests_waiting == 0:
                await asyncio.sleep(0)
            await client.abort("mine")
            await client.resume()
            with pytest.raises(NanocoreError, match=r"'mine' has no embedding: .* 'abort'"):
                await asked
            assert len((await client.embed(PROMPTS[0])).embedding) > 0

    asyncio.run(asyncio.wait_for(scenario(), 100))
