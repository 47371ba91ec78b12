"""Time to first token and between tokens while requests keep arriving.

    nice -n -15 python benchmarks/under_load.py [--model small] [--targets 200] [--plot FILE]

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
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from arrivals import Arrival, Load, draw_arrivals
from machine import CpuTimes, describe_run, nice_sessions, spread, write_report
from models import model_folder

from nanocore.client import AsyncEngineClient, SamplingParams

RESULTS: Final = Path(__file__).parent / "results" / "under-load.json"
WARM_UP_S: Final = 10.0
QUANTILES: Final = [*(1 - np.logspace(0, -3.5, 70)).round(5).tolist(), 1.0]
"""Where the distributions in the report are read: ever closer towards the end that hurts."""
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


@dataclass(slots=True)
class Times:
    """What clients saw in one run, milliseconds: of short requests, of long ones, of all."""

    ttft_ms: list[float] = field(default_factory=list)
    long_ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)
    num_output_tokens: int = 0
    wall_s: float = 0.0
    foreign_cpu_share: float = 0.0

    def figures(self) -> dict[str, float]:
        """Percentiles and rates of the run."""
        return {
            **_percentiles("itl_ms", self.itl_ms),
            **_percentiles("ttft_ms", self.ttft_ms),
            **_percentiles("long_ttft_ms", self.long_ttft_ms),
            "output_tokens_per_s": self.num_output_tokens / self.wall_s,
            "wall_s": self.wall_s,
            "foreign_cpu_share": self.foreign_cpu_share,
        }


def _percentiles(name: str, values: list[float]) -> dict[str, float]:
    if not values:  # tokens that wait for the client come as one output
        raise RuntimeError(f"{name}: nothing was measured; take more requests or --output-tokens")
    p50, p99, largest = np.percentile(values, [50, 99, 100]).tolist()
    return {f"{name}_p50": p50, f"{name}_p99": p99, f"{name}_max": largest}


def settings(
    chunk_tokens: int, targets_ms: list[float], max_model_len: int
) -> dict[str, Arguments]:
    """Flags of the engines that are compared."""
    return {
        "whole": {"max_num_batched_tokens": 2 * max_model_len},  # others come with it
        "chunked": {"max_num_batched_tokens": chunk_tokens},
        **{f"target-{target_ms:g}": {"target_itl_ms": target_ms} for target_ms in targets_ms},
    }


async def run_load(client: AsyncEngineClient, load: Load, seed: str) -> Times:
    """Let all requests of a load arrive, each at its time, and see them through."""
    arrivals = draw_arrivals(load, client.model_card.vocab_size, seed)
    params = SamplingParams(
        temperature=0, max_tokens=load.output_tokens, ignore_eos=True, detokenize=False
    )
    times = Times()
    loop = asyncio.get_running_loop()
    cpu_times = CpuTimes.now()
    start_s = loop.time()

    async def request(arrival: Arrival) -> None:
        due_s = last_s = start_s + arrival.time_s
        await asyncio.sleep(due_s - loop.time())
        num_tokens = 0
        async for output in client.generate(arrival.prompt_token_ids, params):
            now_s = loop.time()
            if num_tokens:
                gaps_ms = times.itl_ms
            else:
                gaps_ms = times.long_ttft_ms if arrival.is_long else times.ttft_ms
            gaps_ms.append((now_s - last_s) * 1e3)
            last_s, num_tokens = now_s, output.metrics.num_output_tokens
        if num_tokens != load.output_tokens:
            raise RuntimeError(f"a request ended with {num_tokens} of {load.output_tokens} tokens")
        times.num_output_tokens += num_tokens

    async with asyncio.TaskGroup() as group:
        for arrival in arrivals:
            group.create_task(request(arrival))
    times.wall_s = loop.time() - start_s
    times.foreign_cpu_share = CpuTimes.now().foreign_share_since(cpu_times)
    return times


async def measure(model: Path, arguments: Arguments, load: Load, seed: str) -> Times:
    """One run of an engine of these flags."""
    async with AsyncEngineClient.launch(model=model, **arguments) as client:
        with nice_sessions():
            warm_up_s = min(WARM_UP_S, load.duration_s)
            await run_load(client, replace(load, duration_s=warm_up_s), f"warm-up {seed}")
            return await run_load(client, load, seed)


def compare(
    model: Path, engines: dict[str, Arguments], load: Load, num_repetitions: int
) -> dict[str, dict[str, Any]]:
    """Of each engine the spread of every figure, and the distributions over all repetitions."""
    runs: dict[str, list[Times]] = {name: [] for name in engines}
    for repetition in range(num_repetitions):
        for name, arguments in engines.items():
            start_s = time.monotonic()
            runs[name].append(asyncio.run(measure(model, arguments, load, f"{repetition}")))
            took_s = time.monotonic() - start_s
            print(f"{name}, repetition {repetition + 1}: {took_s:.0f} s", file=sys.stderr)
    return {
        name: {
            "arguments": engines[name],
            **{
                figure: spread([round(run.figures()[figure], 4) for run in repetitions])
                for figure in repetitions[0].figures()
            },
            **dict(_distributions(repetitions)),
        }
        for name, repetitions in runs.items()
    }


def _distributions(runs: list[Times]) -> Iterator[tuple[str, list[float]]]:
    """Values at QUANTILES, of all repetitions together."""
    for name in ("itl_ms", "ttft_ms"):
        values = [value for run in runs for value in getattr(run, name)]
        yield f"{name}_quantiles", np.quantile(values, QUANTILES).round(3).tolist()


def table(engines: dict[str, dict[str, Any]]) -> str:
    """Medians of the repetitions with their range, a line for each engine."""
    lines = [
        f"| milliseconds | {' | '.join(COLUMNS.values())} |",
        "|---" * (1 + len(COLUMNS)) + "|",
    ]
    for name, summary in engines.items():
        cells = [
            f"{row['median']:.0f} ({row['min']:.0f}-{row['max']:.0f})"
            for row in (summary[column] for column in COLUMNS)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="small")
    parser.add_argument("--rate", type=float, default=0.5, help="short requests per second")
    parser.add_argument("--duration-s", type=float, default=120.0)
    parser.add_argument("--short-tokens", type=int, default=64)
    parser.add_argument("--long-tokens", type=int, default=4096)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--long-every-s", type=float, default=30.0)
    parser.add_argument("--chunk-tokens", type=int, default=512, help="budget of `chunked`")
    parser.add_argument("--targets", default="200", help="milliseconds, by commas")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the distributions")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    """Measure, print, write, and draw if asked to."""
    arguments = parse_arguments()
    load = Load(
        rate=arguments.rate, duration_s=arguments.duration_s, short_tokens=arguments.short_tokens,
        long_tokens=arguments.long_tokens, output_tokens=arguments.output_tokens,
        long_every_s=arguments.long_every_s,
    )  # fmt: skip
    max_model_len = load.long_tokens + load.output_tokens
    shared = {"max_num_seqs": arguments.max_num_seqs, "max_model_len": max_model_len}
    targets_ms = [float(target) for target in arguments.targets.split(",")]
    engines = {
        name: {**shared, **own}
        for name, own in settings(arguments.chunk_tokens, targets_ms, max_model_len).items()
    }
    head = {**describe_run(), "model": Path(arguments.model).name, "load": asdict(load)}
    summary = compare(model_folder(arguments.model), engines, load, arguments.reps)
    print(table(summary))
    report = {**head, "quantiles": QUANTILES, "engines": summary}
    write_report(arguments.out, report)
    if arguments.plot:
        from under_load_picture import draw

        draw(report, arguments.plot)


if __name__ == "__main__":
    main()
