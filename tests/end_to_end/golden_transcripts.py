"""What the demo model says to requests that use each feature, as it is expected to stay.

`python -m tests.end_to_end.golden_transcripts` writes golden_transcripts.json anew: to be read line
by line before it is committed, since every difference is one that users see.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Final

from nanocore.client import (
    AsyncEngineClient,
    CompletionOutput,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from nanocore.demo_model import demo_model_folder
from tests.end_to_end.forked import engine

FILE: Final = Path(__file__).with_suffix(".json")
DEMO_MODEL: Final = demo_model_folder()
FLAGS: Final = ("--dtype", "float32", "--max-num-seqs", "4")
QUESTION: Final = "Sort these words: pear apple fig plum apple"

TURNS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 4, "seed": 1},
    "hot": {"temperature": 6, "seed": 2},
    "top_k": {"temperature": 6, "top_k": 3, "seed": 2},
    "top_p": {"temperature": 6, "top_p": 0.6, "seed": 2},
    "min_p": {"temperature": 6, "min_p": 0.2, "seed": 2},
    "three samples": {"temperature": 5, "n": 3, "seed": 3},
    "no end before token 12": {"temperature": 0, "min_tokens": 12},
    "no end at all": {"temperature": 0, "ignore_eos": True},
    "a stop id": {"temperature": 0, "stop_token_ids": [460]},
    "a stop string": {"temperature": 0, "stop": "fig"},
    "a stop string that stays": {
        "temperature": 0, "stop": ["fig", "ig p"], "include_stop_str_in_output": True,
    },
    "a stop string after token 6": {"temperature": 0, "stop": " ", "min_tokens": 6},
    "repetition penalty": {"temperature": 0, "repetition_penalty": 20},
    "frequency penalty": {"temperature": 0, "frequency_penalty": 2.0, "ignore_eos": True},
    "presence penalty": {"temperature": 0, "presence_penalty": 2.0, "ignore_eos": True},
    "a bias": {"temperature": 0, "logit_bias": {460: -100.0, 350: 8.0}},
    "few tokens": {"temperature": 0, "allowed_token_ids": [2, 350, 358, 460, 471]},
    "bad words": {"temperature": 0, "bad_words": ["apple", "fig"]},
    "log probabilities": {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1, "max_tokens": 4},
    "a list as JSON": {
        "temperature": 0, "max_tokens": 60,
        "structured_outputs": StructuredOutputsParams(
            json={"type": "array", "items": {"enum": ["apple", "fig", "pear", "plum"]},
                  "maxItems": 5},
        ),
    },
    "all at once": {
        "n": 2, "seed": 4, "temperature": 1.2, "top_k": 50, "top_p": 0.9, "min_p": 0.01,
        "min_tokens": 4, "presence_penalty": 0.5, "frequency_penalty": 0.5,
        "repetition_penalty": 1.1, "logit_bias": {460: 1.0}, "bad_words": ["zebra"],
        "allowed_token_ids": [2, *range(300, 700)], "logprobs": 1, "prompt_logprobs": 0,
        "stop": "xyz", "stop_token_ids": [5], "max_tokens": 10,
    },
}  # fmt: skip
"""Sampling parameters beside max_tokens, by what a turn shows."""


async def transcripts(endpoint: str) -> dict[str, Any]:
    """What is said, by turn."""
    async with AsyncEngineClient.connect(endpoint, timeout_s=60) as client:
        tokenizer = await client.get_tokenizer()
        prompt = tokenizer.encode_chat([{"role": "user", "content": QUESTION}])

        async def answer(given: dict[str, Any]) -> RequestOutput:
            params = SamplingParams(**{"max_tokens": 20} | given)
            return await client.complete(prompt, params)

        answers = await asyncio.gather(*map(answer, TURNS.values()))
    return {name: _transcript(output) for name, output in zip(TURNS, answers, strict=True)}


def _transcript(output: RequestOutput) -> dict[str, Any]:
    said: dict[str, Any] = {"samples": [_sample(sample) for sample in output.outputs]}
    if output.prompt_logprobs is not None:
        said["prompt_logprobs"] = [_logprobs(one or {}) for one in output.prompt_logprobs]
    return said


def _sample(sample: CompletionOutput) -> dict[str, Any]:
    said = {
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }
    if sample.logprobs is not None:
        said["logprobs"] = [_logprobs(one) for one in sample.logprobs]
    return said


def _logprobs(candidates: dict[int, Any]) -> list[list[Any]]:
    """Rounded: other kernels add up in another order."""
    return [
        [token_id, round(said.logprob, 2) + 0.0, said.rank, said.decoded_token]
        for token_id, said in candidates.items()
    ]


def main() -> None:
    with engine(DEMO_MODEL, *FLAGS) as running:
        said = asyncio.run(transcripts(running.endpoint))
    lines = [
        f"{json.dumps(name)}: {json.dumps(one, ensure_ascii=False)}" for name, one in said.items()
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
