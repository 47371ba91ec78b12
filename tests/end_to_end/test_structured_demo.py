"""Structured outputs of the demo model, whose right answers are known: through both clients.

Where the grammar leaves its own words, or lets it choose, its answers are right; `test_json_sums`
has the sums that it answers as JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from nanocore.client import (
    LLM,
    AsyncEngineClient,
    InvalidRequestError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from nanocore.demo_model import demo_model_folder
from tests.end_to_end.forked import Engine, engine

pytestmark = pytest.mark.usefixtures("forked_launches")

DEMO_MODEL = demo_model_folder()
SUM = r"\d+ \+ \d+ = \d+"
SCHEMA = {
    "type": "object",
    "properties": {
        "sum": {"type": "integer", "minimum": 0, "maximum": 999},
        "words": {"type": "array", "items": {"enum": ["even", "odd"]}, "maxItems": 3},
    },
    "required": ["sum", "words"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def running() -> Iterator[Engine]:
    with engine(DEMO_MODEL) as started:
        yield started


@pytest.fixture
def joining(running: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let LLM join the engine that runs: another would take seconds."""

    def launch(*_: Any, **__: Any) -> AsyncEngineClient:
        return AsyncEngineClient.connect(running.endpoint, timeout_s=60)

    monkeypatch.setattr(AsyncEngineClient, "launch", launch)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 100))


def greedy(**kind: Any) -> SamplingParams:
    wanted = StructuredOutputsParams(**kind)
    return SamplingParams(temperature=0, max_tokens=64, structured_outputs=wanted)


async def ask(
    client: AsyncEngineClient, question: str, params: SamplingParams | None = None
) -> RequestOutput:
    tokenizer = await client.get_tokenizer()
    prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
    return await client.complete(prompt, params or SamplingParams(temperature=0, max_tokens=64))


def sums(num: int) -> list[tuple[int, int]]:
    rng = random.Random(20)
    return [(rng.randrange(100, 500), rng.randrange(100, 500)) for _ in range(num)]


def pairs(num: int) -> list[tuple[int, int]]:
    rng = random.Random(21)
    return [(a, b) for a, b in ((rng.sample(range(100, 1000), 2)) for _ in range(num))]


def has_form(text: str) -> bool:
    """Whether it is a value of SCHEMA."""
    value = json.loads(text)
    assert list(value) == ["sum", "words"]
    assert type(value["sum"]) is int
    return 0 <= value["sum"] <= 999 and {*value["words"]} <= {"even", "odd"}


def test_an_expression_that_its_answers_have_changes_no_token_of_them(running: Engine) -> None:
    async def main() -> None:
        async with AsyncEngineClient.connect(running.endpoint, timeout_s=60) as client:
            questions = [f"What is {a} + {b}?" for a, b in sums(12)]
            plain = await asyncio.gather(*(ask(client, question) for question in questions))
            held = await asyncio.gather(
                *(ask(client, question, greedy(regex=SUM)) for question in questions)
            )
            assert [o.outputs[0].token_ids for o in held] == [o.outputs[0].token_ids for o in plain]
            answers = [re.fullmatch(SUM, output.outputs[0].text) for output in held]
            assert all(answers)
            right = [f"{a} + {b} = {a + b}" for a, b in sums(12)]
            assert sum(o.outputs[0].text == r for o, r in zip(held, right, strict=True)) >= 10
            assert {output.outputs[0].finish_reason for output in held} == {"stop"}

    run(main())


def test_a_json_schema_gets_the_right_one_of_two_numbers(running: Engine) -> None:
    async def main() -> None:
        async with AsyncEngineClient.connect(running.endpoint, timeout_s=60) as client:
            asked = [
                ask(client, f"Which is larger, {a} or {b}?", greedy(json={"enum": [a, b]}))
                for a, b in pairs(12)
            ]
            outputs = await asyncio.gather(*asked)
            found = [json.loads(output.outputs[0].text) for output in outputs]
            assert sum(one == max(pair) for one, pair in zip(found, pairs(12), strict=True)) >= 11

    run(main())


@pytest.mark.parametrize("compact", [False, True])
def test_whatever_is_sampled_has_the_form(running: Engine, compact: bool) -> None:
    params = SamplingParams(
        temperature=1.5,
        seed=20,
        n=8,
        logprobs=0,
        max_tokens=200,
        structured_outputs=StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=compact),
    )

    async def main() -> None:
        async with AsyncEngineClient.connect(running.endpoint, timeout_s=60) as client:
            samples = (await ask(client, "What is 123 + 456?", params)).outputs
            assert {sample.finish_reason for sample in samples} == {"stop"}
            assert all(has_form(sample.text) for sample in samples)
            assert len({sample.text for sample in samples}) > 1
            assert all(len(sample.logprobs or ()) == len(sample.token_ids) for sample in samples)
            if compact:
                assert not any(" " in sample.text or "\n" in sample.text for sample in samples)

    run(main())


def test_max_tokens_and_stop_strings_may_end_it_before_its_form_does(running: Engine) -> None:
    async def main() -> None:
        async with AsyncEngineClient.connect(running.endpoint, timeout_s=60) as client:
            wanted = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
            cut = SamplingParams(temperature=0, max_tokens=4, structured_outputs=wanted)
            answer = (await ask(client, "What is 1 + 2?", cut)).outputs[0]
            assert answer.finish_reason == "length"
            assert '{"sum":'.startswith(answer.text)
            stop = SamplingParams(
                temperature=0, stop=":", include_stop_str_in_output=True, structured_outputs=wanted
            )
            answer = (await ask(client, "What is 1 + 2?", stop)).outputs[0]
            assert (answer.text, answer.stop_reason) == ('{"sum":', ":")

    run(main())


def test_what_cannot_be_compiled_is_its_requests_error_and_nobody_elses(running: Engine) -> None:
    async def main() -> None:
        async with AsyncEngineClient.connect(running.endpoint, timeout_s=60) as client:
            plain = asyncio.create_task(ask(client, "What is 123 + 456?"))
            bad = {"json": {"type": "nothing"}, "regex": "(a", "grammar": "start: x"}
            for kind, value in bad.items():
                with pytest.raises(InvalidRequestError, match=rf"structured_outputs\.{kind}"):
                    await ask(client, "What is 1 + 2?", greedy(**{kind: value}))
            assert (await plain).outputs[0].text == "123 + 456 = 579"

    run(main())


@pytest.mark.usefixtures("joining")
def test_the_synchronous_client_asks_for_the_same() -> None:
    larger = [[{"role": "user", "content": f"Which is larger, {a} or {b}?"}] for a, b in pairs(8)]
    params = [greedy(choice=[str(a), str(b)]) for a, b in pairs(8)]
    with LLM() as llm:
        outputs = llm.chat(larger, params, use_tqdm=False)  # type: ignore[arg-type]
        found = [int(output.outputs[0].text) for output in outputs]
        assert sum(one == max(pair) for one, pair in zip(found, pairs(8), strict=True)) >= 7

        prompt = llm.get_tokenizer().encode_chat([{"role": "user", "content": "What is 7 + 5?"}])
        both = [greedy(json=SCHEMA), SamplingParams(temperature=0)]
        first, _ = llm.generate([prompt, prompt], both, use_tqdm=False)
        assert has_form(first.outputs[0].text)
