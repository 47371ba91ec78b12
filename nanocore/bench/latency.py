"""`nanocore bench latency`: how long one batch takes, from its submission to its last token.

Prompts are the same random tokens each time, so prefix caching is off unless a flag turns it on.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import replace

import numpy as np
from tqdm import tqdm

from nanocore.bench.offline import OwnEngine, build_parser, parse, percentiles_of, write_json
from nanocore.bench.parser import BenchParser, at_least
from nanocore.bench.vocabulary import Vocabulary
from nanocore.client import LLM, SamplingParams


def run(arguments: list[str]) -> int:
    """Measure and report; the exit code."""
    given, engine = parse(latency_parser(), arguments)
    engine = _without_prefix_caching(engine)
    params = SamplingParams(
        n=given.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=given.output_len,
        detokenize=not given.disable_detokenize,
    )
    with engine.launch() as llm:
        prompts = _prompts(llm, given.batch_size, given.input_len)

        def one_batch() -> float:
            start_s = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - start_s

        for _ in tqdm(range(given.num_iters_warmup), desc="Warmup iterations"):
            one_batch()
        latencies = [one_batch() for _ in tqdm(range(given.num_iters), desc="Bench iterations")]
    found = percentiles_of(latencies)
    print(f"Avg latency: {found.mean} seconds")
    for number, value in found.percentiles.items():
        print(f"{number}% percentile latency: {value} seconds")
    result = {
        "model_id": engine.model_id,
        "avg_latency": found.mean,
        "latencies": latencies,
        "percentiles": found.percentiles,
    }
    write_json(given.output_json, result)
    return 0


def latency_parser() -> BenchParser:
    """The flags."""
    parser = build_parser("latency", "Measure how long a single batch of requests takes.")
    for flag, least, default, text in (
        ("--input-len", 1, 32, "tokens of a prompt"),
        ("--output-len", 1, 128, "tokens of an answer"),
        ("--batch-size", 1, 8, "requests at once"),
        ("--n", 1, 1, "answers to each"),
        ("--num-iters-warmup", 0, 10, "batches before, which do not count"),
        ("--num-iters", 1, 30, "batches that count"),
    ):
        parser.add_argument(flag, type=at_least(least), default=default, metavar="N",
                            help=f"{text} (default: {default})")  # fmt: skip
    parser.add_argument("--disable-detokenize", action="store_true", help="make no text of tokens")
    return parser


def _without_prefix_caching(engine: OwnEngine) -> OwnEngine:
    if {"enable_prefix_caching", "no_enable_prefix_caching"} & engine.arguments.keys():
        return engine
    return replace(engine, arguments={"enable_prefix_caching": False, **engine.arguments})


def _prompts(llm: LLM, batch_size: int, input_len: int) -> list[array[int]]:
    card, rng = llm.model_card, np.random.default_rng(0)
    vocabulary = Vocabulary.of_size(card.vocab_size, card.eos_token_ids)
    return [array("i", vocabulary.draw(rng, input_len).tobytes()) for _ in range(batch_size)]
