"""`nanocore bench throughput`: how fast an engine of its own serves many requests at once."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace

from nanocore.bench.dataset_flags import add_dataset_flags, dataset_options
from nanocore.bench.dataset_options import DatasetOptions
from nanocore.bench.datasets import PromptSource, check_file, load_requests
from nanocore.bench.offline import build_parser, parse, write_json
from nanocore.bench.outcome import BenchRequest
from nanocore.bench.parser import BenchParser, at_least
from nanocore.client import LLM, InvalidRequestError, RequestOutput, SamplingParams
from nanocore.client.tokenizer import Tokenizer


def run(arguments: list[str]) -> int:
    """Measure and report; the exit code."""
    given, engine = parse(throughput_parser(), arguments)
    dataset = dataset_options(given)
    check_file(dataset)
    with engine.launch() as llm:
        source = _source(llm)
        requests = load_requests(dataset, source)
        if given.num_warmups:
            warmup = replace(dataset, num_prompts=given.num_warmups, seed=dataset.seed + 1)
            _generate(llm, load_requests(_that_many(warmup), source), given)
        start_s = time.perf_counter()
        outputs = _generate(llm, requests, given)
        elapsed_s = time.perf_counter() - start_s
    num_input = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(sample.num_tokens for output in outputs for sample in output.outputs)
    total = num_input + num_output
    print(
        f"Throughput: {len(requests) / elapsed_s:.2f} requests/s, "
        f"{total / elapsed_s:.2f} total tokens/s, {num_output / elapsed_s:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {num_input}")
    print(f"Total num output tokens:  {num_output}")
    result = {
        "model_id": engine.model_id,
        "elapsed_time": elapsed_s,
        "num_requests": len(requests),
        "total_num_tokens": total,
        "requests_per_second": len(requests) / elapsed_s,
        "tokens_per_second": total / elapsed_s,
    }
    write_json(given.output_json, result)
    return 0


def throughput_parser() -> BenchParser:
    """The flags."""
    parser = build_parser("throughput", "Measure how fast an engine serves requests, all at once.")
    add = parser.add_argument
    add("--tokenizer", metavar="DIR", help="folder of the tokenizer (default: the engine's)")
    add("--n", type=at_least(1), default=1, metavar="N", help="answers to each (default: 1)")
    add("--num-warmups", type=at_least(0), default=0, metavar="N",
        help="requests before, which do not count (default: 0)")  # fmt: skip
    add("--disable-detokenize", action="store_true", help="make no text of tokens")
    add("--disable-tqdm", action="store_true", help="no progress bar")
    add_dataset_flags(parser)
    return parser


def _source(llm: LLM) -> PromptSource:
    card = llm.model_card
    tokenizer: Tokenizer | None = None
    if card.files:
        try:
            tokenizer = llm.get_tokenizer()
        except InvalidRequestError:  # files, but none of a tokenizer
            tokenizer = None
    return PromptSource(
        tokenizer,
        takes_text=False,
        vocab_size=card.vocab_size,
        eos_token_ids=tuple(card.eos_token_ids),
    )


def _that_many(options: DatasetOptions) -> DatasetOptions:
    """Prefixes are no more than prompts."""
    num_prefixes = min(options.prefix_repetition_num_prefixes, options.num_prompts)
    return replace(options, prefix_repetition_num_prefixes=num_prefixes)


def _generate(
    llm: LLM, requests: Sequence[BenchRequest], given: argparse.Namespace
) -> list[RequestOutput]:
    params = [
        SamplingParams(
            n=given.n,
            temperature=1.0,
            ignore_eos=True,
            max_tokens=request.num_output_tokens,
            detokenize=not given.disable_detokenize,
        )
        for request in requests
    ]
    prompts = [request.prompt for request in requests]
    return llm.generate(prompts, params, use_tqdm=not given.disable_tqdm)
