"""What --kv-cache-dtype int8 costs in answers and gives in room, on the demo model.

    nice -n -15 python benchmarks/kv_cache_dtype.py [--count 40]

Answers: the demo model's held-out questions, `count` of each task, asked of one engine after the
other; right is what is right to the letter, greedily decoded. The model is sure of these answers.
It is not of what follows random tokens, so there rounding shows: `tokens_like_bfloat16` is how many
of 64 greedy tokens come before the first that is not bfloat16's, the mean of 64 prompts. float32
puts that in proportion. Room: the blocks that engines get out of the same --kv-cache-memory-bytes,
and bytes of a token by head size. fp8 needs CUDA and is not here.
Writes benchmarks/results/kv-cache-dtype.json.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Final

import torch
from machine import describe_run, nice_sessions, write_report

from nanocore.client import LLM, SamplingParams
from nanocore.client.engine_flags import EngineArgument
from nanocore.kernels.kv_quantization import kv_cache_format

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.demo_model.score import exact_match
from tools.demo_model.tasks import TASKS, Example, held_out

RESULTS: Final = Path(__file__).parent / "results" / "kv-cache-dtype.json"
ENGINES: Final[dict[str, dict[str, EngineArgument]]] = {
    "bfloat16": {"dtype": "bfloat16", "kv_cache_dtype": "auto"},
    "int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "float32": {"dtype": "float32", "kv_cache_dtype": "auto"},
}
"""float32: computes in it, too."""
CACHE_BYTES: Final = 64 * 2**20
SEED: Final = 1  # that of the tables of tools/demo_model
HEAD_SIZES: Final = (64, 128)
NUM_RANDOM: Final = 64
RANDOM_TOKENS: Final = 64
GREEDY: Final = SamplingParams(temperature=0, max_tokens=160)
ENDLESS: Final = SamplingParams(
    temperature=0, max_tokens=RANDOM_TOKENS, ignore_eos=True, detokenize=False
)


@dataclass(frozen=True, slots=True)
class Answers:
    """Of one engine. continuations: the tokens that follow random ones."""

    texts: list[str]
    continuations: list[list[int]]
    num_blocks: int


def ask(engine: str, examples: list[Example]) -> Answers:
    """All questions to one engine."""
    rng = random.Random(SEED)
    # So many requests that it is the memory that limits the blocks.
    arguments = {"max_num_seqs": 256, "kv_cache_memory_bytes": CACHE_BYTES, **ENGINES[engine]}
    with LLM(**arguments) as llm, nice_sessions():
        card = llm.model_card
        prompts = [rng.choices(range(card.vocab_size), k=RANDOM_TOKENS) for _ in range(NUM_RANDOM)]
        conversations = [example.messages for example in examples]
        texts = llm.chat(conversations, GREEDY, use_tqdm=False)
        continuations = llm.generate(prompts, ENDLESS, use_tqdm=False)
        return Answers(
            [output.outputs[0].text for output in texts],
            [list(output.outputs[0].token_ids) for output in continuations],
            card.num_blocks,
        )


def compare(count: int) -> dict[str, Any]:
    """Of each engine its right answers by task, its likeness to bfloat16, and its blocks."""
    examples = [example for task in TASKS for example in held_out(task, count, SEED)]
    report: dict[str, Any] = {}
    reference: Answers | None = None
    for engine in ENGINES:
        answers = ask(engine, examples)
        reference = reference or answers
        scores = exact_match(examples, answers.texts)
        others = [a != b for a, b in zip(answers.texts, reference.texts, strict=True)]
        alike = map(num_alike, answers.continuations, reference.continuations)
        report[engine] = {
            "num_answers": len(others),
            "right": sum(score.right for score in scores),
            "right_by_task": {score.task: score.right for score in scores},
            "other_answers_than_bfloat16": sum(others),
            "tokens_like_bfloat16": round(mean(alike), 1),
            "num_blocks": answers.num_blocks,
        }
    return report


def num_alike(tokens: list[int], others: list[int]) -> int:
    """How many come before the first difference."""
    pairs = zip(tokens, others, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(tokens))


def bytes_per_token() -> dict[str, dict[str, int]]:
    """Of K and V in one KV head of one layer, by cache dtype and head size."""
    return {
        name: {
            str(size): 2 * kv_cache_format(name, torch.bfloat16, device).bytes_per_head(size)
            for size in HEAD_SIZES
        }
        for name, device in (("auto", "cpu"), ("int8", "cpu"), ("fp8", "cuda"))
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=40, help="questions of each task")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    engines, sizes = compare(arguments.count), bytes_per_token()
    print("| engine | right | other answers than bfloat16 | tokens alike | blocks in 64 MiB |")
    print("|---|---|---|---|---|")
    for name, row in engines.items():
        share = f"{row['right']} of {row['num_answers']} ({row['right'] / row['num_answers']:.1%})"
        others, alike = row["other_answers_than_bfloat16"], row["tokens_like_bfloat16"]
        print(f"| {name} | {share} | {others} | {alike} | {row['num_blocks']} |")
    for task in TASKS:
        print(f"{task}: {', '.join(str(row['right_by_task'][task]) for row in engines.values())}")
    print(f"bytes of a token in a KV head: {sizes}")
    record = {
        **describe_run(),
        "questions_per_task": arguments.count,
        "cache_bytes": CACHE_BYTES,
        "engines": engines,
        "bytes_per_token_and_kv_head": sizes,
    }
    write_report(arguments.out, record)


if __name__ == "__main__":
    main()
