"""Structured outputs through the real program: they parse, whatever runs beside them and however.

The demo model samples at temperature 1 and knows no JSON but sums, so nothing but the masks makes
its output what it is.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import jsonschema
import pytest

from nanocore.client import (
    AsyncEngineClient,
    CompletionOutput,
    InvalidRequestError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from nanocore.demo_model import demo_model_folder
from tests.end_to_end.forked import engine

T = TypeVar("T")
DEMO_MODEL = demo_model_folder()
PROMPT = "What is 12 + 30?"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,12}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        "address": {"anyOf": [{"$ref": "#/$defs/address"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
    "$defs": {
        "address": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        }
    },
}
CHOICES = ["yes", "no", "perhaps", "perhaps not", "ß 🎉"]
TOOL = {
    "structures": [
        {"begin": "<call=add>", "schema": {"type": "array", "items": {"enum": [1, 2]},
                                           "minItems": 2, "maxItems": 2}, "end": "</call>"},
        {"begin": "<call=stop>", "schema": {"const": None}, "end": "</call>"},
    ],
    "triggers": ["<call="],
}  # fmt: skip
GRAMMAR = 'start: "(" item ("," item)* ")"\nitem: /[0-9]{1,3}/ | start'
FLAGS = (
    "--max-num-batched-tokens 24 --num-gpu-blocks-override 40 --block-size 16",  # it preempts
    "--tp 2",
    "--pp 2",
    "--enforce-eager --no-enable-prefix-caching",
)


def is_person(text: str) -> bool:
    jsonschema.validate(json.loads(text), PERSON)
    return True


def is_compact_person(text: str) -> bool:
    return is_person(text) and not re.search(r"[\s]", re.sub(r'"(\\.|[^"\\])*"', "", text))


def has_structures(text: str) -> bool:
    for name, body in re.findall(r"<call=(.*?)>(.*?)</call>", text):
        assert json.loads(body) in {"add": [[1, 1], [1, 2], [2, 1], [2, 2]], "stop": [None]}[name]
    return text.count("<call=") == len(re.findall(r"<call=(?:add|stop)>.*?</call>", text))


def is_nested(text: str) -> bool:
    while (shorter := re.sub(r"\((?:\d{1,3},)*\d{1,3}\)", "7", text)) != text:
        text = shorter
    return text == "7"


KINDS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "json": ({"json": PERSON}, is_person),
    "compact": ({"json": json.dumps(PERSON), "disable_any_whitespace": True}, is_compact_person),
    "regex": ({"regex": "[a-f]{3,9}(-[0-9]{2}){1,4}"},
              lambda text: bool(re.fullmatch("[a-f]{3,9}(-[0-9]{2}){1,4}", text))),
    "choice": ({"choice": CHOICES}, CHOICES.__contains__),
    "grammar": ({"grammar": GRAMMAR}, is_nested),
    "json_object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    "structural_tag": ({"structural_tag": TOOL}, has_structures),
}  # fmt: skip
OTHERS: tuple[dict[str, Any], ...] = (
    {},
    {"n": 3},
    {"temperature": 0.0},
    {"top_p": 0.9, "top_k": 50, "min_p": 0.01},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 2},
    {"prompt_logprobs": 1, "logit_bias": {2: 1.5}},
)


def all_requests() -> list[tuple[str, dict[str, Any]]]:
    """(kind, sampling parameters) of every kind with all that may come with it."""
    return [
        (kind, {"temperature": 1.0, "max_tokens": 160, **others})
        for kind in KINDS
        for others in OTHERS
    ]


def with_client(endpoint: str, use: Callable[[AsyncEngineClient], Awaitable[T]]) -> T:
    async def run() -> T:
        async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
            return await use(client)

    return asyncio.run(asyncio.wait_for(run(), 240))


async def ask(client: AsyncEngineClient, kind: str, seed: int, **given: Any) -> RequestOutput:
    wanted = StructuredOutputsParams(**KINDS[kind][0])
    params = SamplingParams(seed=seed, structured_outputs=wanted, **given)
    return await client.complete(PROMPT, params)


def said(sample: CompletionOutput) -> tuple[Any, ...]:
    return sample.token_ids, sample.text, sample.finish_reason


def check(kind: str, output: RequestOutput) -> int:
    """That what ended by itself is what was asked for; returns how many samples did."""
    num_finished = 0
    for sample in output.outputs:
        assert sample.finish_reason in ("stop", "length"), sample.message
        if sample.finish_reason == "stop":
            assert KINDS[kind][1](sample.text), sample.text
            num_finished += 1
    return num_finished


async def ask_for_all(client: AsyncEngineClient) -> list[RequestOutput]:
    requests = enumerate(all_requests())
    return await asyncio.gather(*(ask(client, kind, i, **given) for i, (kind, given) in requests))


def test_every_kind_is_what_was_asked_for_and_the_same_alone() -> None:
    with engine(DEMO_MODEL, "--max-num-seqs", "20") as running:
        outputs = with_client(running.endpoint, ask_for_all)
        finished = dict.fromkeys(KINDS, 0)
        for (kind, _), output in zip(all_requests(), outputs, strict=True):
            finished[kind] += check(kind, output)
        assert all(finished.values()), finished
        for i in range(0, len(outputs), 5):
            kind, given = all_requests()[i]
            alone = with_client(running.endpoint, lambda c, k=kind, i=i, g=given: ask(c, k, i, **g))
            assert [*map(said, alone.outputs)] == [*map(said, outputs[i].outputs)]


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_tokens_are_the_same_preempted_in_chunks_and_on_several_ranks() -> None:
    found = []
    for flags in ("", *FLAGS):
        command = ["--dtype", "float32", "--max-num-seqs", "20", *flags.split()]
        with engine(DEMO_MODEL, *command) as running:

            async def run(client: AsyncEngineClient) -> tuple[list[RequestOutput], int]:
                outputs = await ask_for_all(client)
                return outputs, (await client.stats()).num_preemptions

            outputs, num_preemptions = with_client(running.endpoint, run)
            assert (num_preemptions > 0) == ("blocks" in flags)
        found.append([[said(sample) for sample in output.outputs] for output in outputs])
        assert found[-1] == found[0], flags


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"json": "{"}, "structured_outputs.json"),
    ({"json": {"type": "object", "properties": {"a": {"items": {"not": {}}}}}},
     "/properties/a/items/not"),
    ({"json": {"properties": {"b": {"type": "strin"}}}}, "/properties/b/type"),
    ({"json": '{"items":' * 70 + "{}" + "}" * 70}, "64"),
    ({"regex": "ab(c"}, "structured_outputs.regex"),
    ({"grammar": 'start: foo "x"\nfoo: /[a/'}, "structured_outputs.grammar"),
    ({"structural_tag": {"structures": [{"begin": "<a>", "schema": {"type": 3}, "end": "<"}],
                         "triggers": ["<"]}}, "structured_outputs.structural_tag"),
    ({"regex": "((((((a{100}){100}){100}){100}){100}){100}){100}"}, "too complex"),
]  # fmt: skip


def test_what_cannot_be_compiled_is_refused_with_its_place_and_others_go_on() -> None:
    with engine(DEMO_MODEL) as running:

        async def run(client: AsyncEngineClient) -> None:
            plain = SamplingParams(seed=1, max_tokens=200, ignore_eos=True)
            expected = await client.complete(PROMPT, plain)
            bystander = asyncio.create_task(client.complete(PROMPT, plain))
            for given, place in WRONG * 2:  # known to be wrong the second time
                params = SamplingParams(structured_outputs=StructuredOutputsParams(**given))
                with pytest.raises(InvalidRequestError, match=re.escape(place)):
                    await client.complete(PROMPT, params)
            assert said((await bystander).outputs[0]) == said(expected.outputs[0])
            stats = await client.stats()
            assert stats.num_requests_running == stats.num_requests_waiting == 0

        with_client(running.endpoint, run)


def test_a_model_without_a_tokenizer_serves_all_but_structured_outputs(tmp_path: Path) -> None:
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    with engine(tmp_path / "model") as running:

        async def run(client: AsyncEngineClient) -> None:
            plain = SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False)
            output = await client.complete([5, 6, 7], plain)
            assert len(output.outputs[0].token_ids) == 3
            wanted = StructuredOutputsParams(choice=["a"])
            params = SamplingParams(structured_outputs=wanted, detokenize=False)
            with pytest.raises(InvalidRequestError, match=r"tokenizer\.json"):
                await client.complete([5, 6, 7], params)

        with_client(running.endpoint, run)
