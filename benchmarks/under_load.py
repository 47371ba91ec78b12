"""Time to first token and between tokens while requests keep arriving.

    python benchmarks/under_load.py [--model small] [--targets 200]

Short requests arrive as a Poisson process and stream; now and then a long prompt comes among them.
Engines take turns over the repetitions, each with the same arrivals: `whole`, whose budget takes a
long prompt in one step; `chunked`, with --max-num-batched-tokens of --chunk-tokens; and `target-N`,
with the default budget and --target-itl-ms N. Times are the client's: from the moment at which a
request is due to its first token, and between the outputs of a stream. Each engine runs a short
load first that does not count. Writes benchmarks/results/under-load.json.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from array import array
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from models import model_folder
from report import describe_run, positive, spread, table, with_range, write_report

from nanocore.bench.load import BenchRequest, LoadRun, run_load
from nanocore.bench.targets import EngineTarget
from nanocore.client import AsyncEngineClient, SamplingParams

RESULTS: Final = Path(__file__).parent / "results" / "under-load.json"
WARM_UP_S: Final = 10.0
COLUMNS: Final = {
    "itl_ms_p50": "ITL p50",
    "itl_ms_p99": "ITL p99",
    "itl_ms_max": "ITL max",
    "ttft_ms_p50": "TTFT p50",
    "ttft_ms_p99": "TTFT p99",
    "long_ttft_ms_p50": "TTFT of long prompts",
    "output_tokens_per_s": "output tok/s",
}
Arguments = dict[str, int | float]


@dataclass(frozen=True, slots=True)
class Load:
    """What arrives. rate: short requests per second, in the mean. duration_s: of the arrivals.

    short_tokens, long_tokens: of the prompts. output_tokens: of either. long_every_s: a long prompt
    comes at the middle of each such stretch.
    """

    rate: float = 0.5
    duration_s: float = 120.0
    short_tokens: int = 64
    long_tokens: int = 4096
    output_tokens: int = 48
    long_every_s: float = 30.0


def draw_arrivals(load: Load, vocab_size: int, seed: str) -> list[BenchRequest]:
    """All arrivals in the order of their times, at least one of either kind; equal by seed.

    Prompts are random token ids: nothing is shared, and no tokenizer takes part.
    """
    rng = random.Random(seed)  # of a str: the same on every platform

    def arrival(time_s: float, num_tokens: int) -> BenchRequest:
        prompt = array("i", rng.choices(range(vocab_size), k=num_tokens))
        return BenchRequest(prompt, num_tokens, load.output_tokens, time_s)

    time_s, arrivals = 0.0, [arrival(0.0, load.short_tokens)]
    while (time_s := time_s + rng.expovariate(load.rate)) < load.duration_s:
        arrivals.append(arrival(time_s, load.short_tokens))
    num_long = max(1, int(load.duration_s / load.long_every_s))
    middle_s = min(load.long_every_s, load.duration_s) / 2
    arrivals += [
        arrival(middle_s + i * load.long_every_s, load.long_tokens) for i in range(num_long)
    ]
    return sorted(arrivals, key=due_s)


def due_s(request: BenchRequest) -> float:
    """When it arrives, since the start of the load."""
    assert request.arrival_s is not None
    return request.arrival_s


def figures(run: LoadRun, load: Load) -> dict[str, float]:
    """Percentiles and rates of what clients saw in one run."""
    for each in run.outcomes:
        if each.error or each.num_output_tokens != load.output_tokens:
            raise RuntimeError(
                f"a request ended with {each.num_output_tokens} of {load.output_tokens} tokens: "
                f"{each.error or 'no error'}"
            )

    def ttfts_ms(num_prompt_tokens: int) -> list[float]:
        own = [each for each in run.outcomes if each.num_prompt_tokens == num_prompt_tokens]
        return [(each.chunk_times_s[0] - each.arrival_s) * 1e3 for each in own]

    return {
        **_percentiles("itl_ms", [gap_s * 1e3 for each in run.outcomes for gap_s in each.itls_s]),
        **_percentiles("ttft_ms", ttfts_ms(load.short_tokens)),
        **_percentiles("long_ttft_ms", ttfts_ms(load.long_tokens)),
        "output_tokens_per_s": len(run.outcomes) * load.output_tokens / run.duration_s,
        "wall_s": run.duration_s,
    }


def _percentiles(name: str, values: list[float]) -> dict[str, float]:
    if not values:  # tokens that wait for the client come as one output
        raise RuntimeError(f"{name}: nothing was measured; take more requests or --output-tokens")
    p50, p99, largest = np.percentile(values, [50, 99, 100]).tolist()
    return {f"{name}_p50": p50, f"{name}_p99": p99, f"{name}_max": largest}


async def see_through(client: AsyncEngineClient, load: Load, seed: str) -> LoadRun:
    """Let all requests of a load arrive, each at its time, and see them through."""
    arrivals = draw_arrivals(load, client.model_card.vocab_size, seed)
    params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False)
    return await run_load(EngineTarget(client, params), arrivals, list(map(due_s, arrivals)))


async def measure(model: Path, arguments: Arguments, load: Load, seed: str) -> LoadRun:
    """One run of an engine of these flags."""
    async with AsyncEngineClient.launch(model=model, **arguments) as client:
        warm_up_s = min(WARM_UP_S, load.duration_s)
        await see_through(client, replace(load, duration_s=warm_up_s), f"warm-up {seed}")
        return await see_through(client, load, seed)


def compare(
    model: Path, engines: dict[str, Arguments], load: Load, num_repetitions: int
) -> dict[str, dict[str, Any]]:
    """Of each engine the spread of every figure."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for repetition in range(num_repetitions):
        for name, arguments in engines.items():
            start_s = time.monotonic()
            run = asyncio.run(measure(model, arguments, load, f"{repetition}"))
            runs[name].append(figures(run, load))
            took_s = time.monotonic() - start_s
            print(f"{name}, repetition {repetition + 1}: {took_s:.0f} s", file=sys.stderr)
    return {
        name: {
            "arguments": engines[name],
            **{figure: spread([run[figure] for run in own]) for figure in own[0]},
        }
        for name, own in runs.items()
    }


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="small")
    for name, value in asdict(Load()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--chunk-tokens", type=positive, default=512, help="budget of `chunked`")
    parser.add_argument("--targets", default="200", help="milliseconds, by commas")
    parser.add_argument("--max-num-seqs", type=positive, default=64)
    parser.add_argument("--reps", type=positive, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write."""
    arguments = parse_arguments()
    load = Load(**{name: getattr(arguments, name) for name in asdict(Load())})
    max_model_len = load.long_tokens + load.output_tokens
    own_arguments: dict[str, Arguments] = {
        "whole": {"max_num_batched_tokens": 2 * max_model_len},  # others come with it
        "chunked": {"max_num_batched_tokens": arguments.chunk_tokens},
        **{f"target-{ms}": {"target_itl_ms": float(ms)} for ms in arguments.targets.split(",")},
    }
    shared = {"max_num_seqs": arguments.max_num_seqs, "max_model_len": max_model_len}
    engines = {name: {**shared, **own} for name, own in own_arguments.items()}
    report = {**describe_run(), "model": Path(arguments.model).name, "load": asdict(load)}
    report["engines"] = compare(model_folder(arguments.model), engines, load, arguments.reps)
    rows = [["milliseconds", *COLUMNS.values()]]
    for name, summary in report["engines"].items():
        rows.append([name, *(with_range(summary[column], 0) for column in COLUMNS)])
    print(table(rows))
    write_report(arguments.out, report)


if __name__ == "__main__":
    main()
