"""Bystanders: six requests of another client, which an attack may not change by a bit.

They are sent in rounds, all at once. A round in a quiet engine says what each answers: tokens,
text, log probabilities, how it ends. Rounds beside an attack must answer the same.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from nanocore.client import AsyncEngineClient, SamplingParams, StructuredOutputsParams
from tests.reliability.visitor import PATIENCE_S

Answers = dict[str, list[dict[str, Any]]]

NUM_TOKENS: Final = 24
_SCHEMA: Final = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99999}},
    "required": ["sum"],
    "additionalProperties": False,
}
_FREE: Final[dict[str, Any]] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
REQUESTS: Final[dict[str, tuple[str, SamplingParams]]] = {
    "greedy": ("Count from 7 to 12.", SamplingParams(temperature=0, **_FREE)),
    "seeded": ("Sort: pear apple fig", SamplingParams(temperature=1.5, seed=7, **_FREE)),
    "logprobs": ("What is 1 + 2?", SamplingParams(temperature=1.0, seed=8, logprobs=3, **_FREE)),
    "schema": (
        "What is 123 + 456?",
        SamplingParams(
            temperature=1.0,
            seed=9,
            max_tokens=NUM_TOKENS,
            structured_outputs=StructuredOutputsParams(json=_SCHEMA),
        ),
    ),
    "samples": ("Reverse: red green", SamplingParams(temperature=1.2, seed=10, n=2, **_FREE)),
    "edited": (
        "Copy: one two three",
        SamplingParams(
            temperature=0.9,
            seed=11,
            presence_penalty=0.5,
            repetition_penalty=1.2,
            stop=["zebra"],
            **_FREE,
        ),
    ),
}
NUM_SAMPLES: Final = sum(params.n for _, params in REQUESTS.values())


async def answer_all(client: AsyncEngineClient, *begun: asyncio.Event) -> Answers:
    """One round: what each request answers. begun: each set when one of them has a token."""
    unset = iter(begun)

    async def answer(name: str) -> tuple[str, list[dict[str, Any]]]:
        prompt, params = REQUESTS[name]
        last, event = None, next(unset, None)
        async for output in client.generate(prompt, params):
            last = output
            if event is not None:
                event.set()
        assert last is not None
        return name, [
            {
                "token_ids": sample.token_ids,
                "text": sample.text,
                "finish_reason": sample.finish_reason,
                "logprobs": None if sample.logprobs is None else list(sample.logprobs),
            }
            for sample in last.outputs
        ]

    answers = dict(await asyncio.gather(*map(answer, REQUESTS)))
    assert isinstance(json.loads(answers["schema"][0]["text"]), dict)
    return answers


@asynccontextmanager
async def beside(endpoint: str, quiet: Answers, *, one_round: bool = False) -> AsyncIterator[None]:
    """Bystanders, before, during and after the block; each answers as in the quiet round.

    When the block begins, each of a round's requests has had a token. one_round: that round is all,
    since the block keeps others from being accepted.
    """
    client = AsyncEngineClient.connect(endpoint, timeout_s=PATIENCE_S, resume=False)
    async with client:
        begun = [asyncio.Event() for _ in REQUESTS]
        over = asyncio.Event()

        async def rounds() -> None:
            assert await answer_all(client, *begun) == quiet
            while not (one_round or over.is_set()):
                assert await answer_all(client) == quiet

        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            group.create_task(rounds())
            for event in begun:
                await event.wait()
            yield
            over.set()


def run_beside(
    endpoint: str, quiet: Answers, attack: Callable[[], None], *, one_round: bool = False
) -> None:
    """An attack, in a thread, beside bystanders."""

    async def main() -> None:
        async with beside(endpoint, quiet, one_round=one_round):
            await asyncio.to_thread(attack)

    asyncio.run(main())
