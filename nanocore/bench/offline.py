"""`nanocore bench throughput` and `latency`, which launch their own engine.

Latency repeats one batch of the same prompts, so prefix caching is off unless a flag enables it.
"""

from __future__ import annotations

import argparse
import json
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from tqdm import tqdm

from nanocore.bench.dataset_options import add_dataset_flags, dataset_options
from nanocore.bench.datasets import PromptSource, PromptVocabulary, check_file, load_requests
from nanocore.bench.load import BenchRequest
from nanocore.client import LLM, InvalidRequestError, RequestOutput, SamplingParams
from nanocore.protocol.errors import ConfigError, EngineStartError
from nanocore.system.flags import FlagParser, at_least
from nanocore.system.logs import complain

PERCENTILES: Final = (10, 25, 50, 75, 90, 99)
DEMO_MODEL_ID: Final = "demo model"


@dataclass(frozen=True, slots=True)
class OwnEngine:
    """model: None is the demo model. arguments: of `LLM`. hint: see `launch`, or ''."""

    model: str | None
    tokenizer: str | None
    arguments: Mapping[str, str | bool]
    hint: str

    def launch(self) -> LLM:
        """Start an engine.

        Raises:
            EngineStartError: the engine's own reason, and the hint if it refused its flags.
        """
        arguments: dict[str, Any] = dict(self.arguments)
        try:
            return LLM(self.model, tokenizer=self.tokenizer, **arguments)
        except EngineStartError as error:
            if error.exit_code == ConfigError.exit_code and self.hint:
                raise EngineStartError(f"{error}; {self.hint}", error.exit_code) from None
            raise

    @property
    def model_id(self) -> str:
        return self.model or DEMO_MODEL_ID


def _build_parser(name: str, description: str) -> FlagParser:
    parser = FlagParser(
        f"nanocore bench {name}",
        f"{description} Flags that are not listed here are the engine's.",
        has_engine=True,
    )
    parser.add_argument("--model", help="folder, or id on the hub (default: the demo model)")
    parser.add_argument("--output-json", metavar="FILE", help="write the results to this file")
    return parser


def _add_counts(parser: FlagParser, *flags: tuple[str, int, int, str]) -> None:
    """Add integer flags of (name, least value, default, help)."""
    for flag, least, default, text in flags:
        parser.add_argument(flag, type=at_least(least), default=default, metavar="N",
                            help=f"{text} (default: {default})")  # fmt: skip


def parse(parser: FlagParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, OwnEngine]:
    """Return the benchmark's flags, and the engine with all other flags.

    Raises:
        ConfigError: an invalid flag or value, or --output-json in a missing folder.
        SystemExit: --help.
    """
    given, others = parser.split(arguments)
    for notice in parser.notices:
        complain(f"{parser.prog}: {notice}")
    if given.output_json is not None and not Path(given.output_json).parent.is_dir():
        raise ConfigError(f"--output-json {given.output_json}: no such folder")
    return given, OwnEngine(
        given.model,
        getattr(given, "tokenizer", None),
        engine_arguments(others),
        parser.launch_hint(others),
    )


def engine_arguments(flags: Sequence[str]) -> dict[str, str | bool]:
    """Return max_num_seqs="8" for --max-num-seqs 8. The engine refuses unknown flags.

    Raises:
        ConfigError: an argument is not a flag with two dashes.
    """
    arguments: dict[str, str | bool] = {}
    ahead = list(flags)
    while ahead:
        flag, has_value, value = ahead.pop(0).partition("=")
        if not flag.startswith("--") or not flag[2:].replace("-", "_").isidentifier():
            raise ConfigError(f"{flag} is not a flag; spell the engine's out, as --max-num-seqs 8")
        if not has_value and ahead and not ahead[0].startswith("--"):
            value = ahead.pop(0)
            has_value = "="
        arguments[flag[2:].replace("-", "_")] = value if has_value else True
    return arguments


def _write_json(path: str | None, result: Mapping[str, Any]) -> None:
    if path is None:
        return
    try:
        Path(path).write_text(json.dumps(result, indent=4) + "\n", "utf-8")
    except OSError as error:
        raise ConfigError(f"--output-json {path}: {error.strerror}") from None


def throughput_parser() -> FlagParser:
    parser = _build_parser("throughput", "Measure how fast an engine serves requests, all at once.")
    add = parser.add_argument
    add("--tokenizer", metavar="DIR", help="folder of the tokenizer (default: the engine's)")
    _add_counts(
        parser,
        ("--n", 1, 1, "samples per request"),
        ("--num-warmups", 0, 0, "warm-up requests, not measured"),
    )
    add("--disable-detokenize", action="store_true", help="do not decode tokens")
    add("--disable-tqdm", action="store_true", help="do not show a progress bar")
    add_dataset_flags(parser)
    return parser


def run_throughput(arguments: list[str]) -> int:
    given, engine = parse(throughput_parser(), arguments)
    dataset = dataset_options(given)
    check_file(dataset)
    with engine.launch() as llm:
        source = _source(llm)
        requests = load_requests(dataset, source)
        if given.num_warmups:
            warmup = replace(
                dataset,
                num_prompts=given.num_warmups,
                seed=dataset.seed + 1,
                prefix_repetition_num_prefixes=min(
                    dataset.prefix_repetition_num_prefixes, given.num_warmups
                ),
            )
            _generate(llm, load_requests(warmup, source), given)
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
    _write_json(given.output_json, result)
    return 0


def _source(llm: LLM) -> PromptSource:
    card = llm.model_card
    try:
        tokenizer = llm.get_tokenizer() if card.files else None
    except InvalidRequestError:  # the model's files contain no tokenizer
        tokenizer = None
    return PromptSource.of_engine(tokenizer, card)


def _params(given: argparse.Namespace, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        n=given.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=max_tokens,
        detokenize=not given.disable_detokenize,
    )


def _generate(
    llm: LLM, requests: Sequence[BenchRequest], given: argparse.Namespace
) -> list[RequestOutput]:
    params = [_params(given, request.num_output_tokens) for request in requests]
    prompts = [request.prompt for request in requests]
    return llm.generate(prompts, params, use_tqdm=not given.disable_tqdm)


def latency_parser() -> FlagParser:
    parser = _build_parser("latency", "Measure how long a single batch of requests takes.")
    _add_counts(
        parser,
        ("--input-len", 1, 32, "prompt tokens"),
        ("--output-len", 1, 128, "output tokens"),
        ("--batch-size", 1, 8, "concurrent requests"),
        ("--n", 1, 1, "samples per request"),
        ("--num-iters-warmup", 0, 10, "warm-up batches, not measured"),
        ("--num-iters", 1, 30, "measured batches"),
    )
    parser.add_argument("--disable-detokenize", action="store_true", help="do not decode tokens")
    return parser


def run_latency(arguments: list[str]) -> int:
    given, engine = parse(latency_parser(), arguments)
    if not {"enable_prefix_caching", "no_enable_prefix_caching"} & engine.arguments.keys():
        engine = replace(engine, arguments={"enable_prefix_caching": False, **engine.arguments})
    params = _params(given, given.output_len)
    with engine.launch() as llm:
        vocabulary = PromptVocabulary(replace(_source(llm), tokenizer=None), as_text=False)
        rng = np.random.default_rng(0)
        prompts = [
            array("i", vocabulary.draw(rng, given.input_len).tobytes())
            for _ in range(given.batch_size)
        ]

        def one_batch() -> float:
            start_s = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - start_s

        for _ in tqdm(range(given.num_iters_warmup), desc="Warmup iterations"):
            one_batch()
        latencies = [one_batch() for _ in tqdm(range(given.num_iters), desc="Bench iterations")]
    mean, points = float(np.mean(latencies)), np.percentile(latencies, PERCENTILES).tolist()
    percentiles = dict(zip(PERCENTILES, points, strict=True))
    print(f"Avg latency: {mean} seconds")
    for number, value in percentiles.items():
        print(f"{number}% percentile latency: {value} seconds")
    result = {
        "model_id": engine.model_id,
        "avg_latency": mean,
        "latencies": latencies,
        "percentiles": percentiles,
    }
    _write_json(given.output_json, result)
    return 0
