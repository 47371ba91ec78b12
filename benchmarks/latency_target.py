"""What --target-itl-ms does: decodes while long prompts are computed beside them.

    nice -n -15 python benchmarks/latency_target.py [--model small] [--targets inf,200,100]

Four streams decode; then four prompts of 1,500 tokens come. Reports the time between tokens of the
streams until the prompts are done, and how long the prompts took, for each target in turn, several
rounds; writes benchmarks/results/latency-target.json.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from machine import describe_run, nice_sessions, spread, write_report
from models import model_folder

from nanocore.client import AsyncEngineClient, SamplingParams

RESULTS: Final = Path(__file__).parent / "results" / "latency-target.json"
NUM_STREAMS: Final = 4
NUM_PROMPTS: Final = 4
PROMPT_TOKENS: Final = 1500
QUIET_TOKENS: Final = 60  # that each stream decodes before the prompts come


async def measure(model: Path, target_ms: float) -> dict[str, float]:
    """One round with one target: milliseconds between tokens, and seconds of the prompts."""
    stream_params = SamplingParams(
        temperature=0, max_tokens=2000, ignore_eos=True, detokenize=False
    )
    prompt_params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    rng = random.Random(1)
    arrivals: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
    ready = asyncio.Event()
    over = asyncio.Event()
    async with AsyncEngineClient.launch(
        model=model, max_model_len=4096, max_num_seqs=32, target_itl_ms=target_ms
    ) as client:

        def prompt(num_tokens: int) -> list[int]:
            return [rng.randrange(client.model_card.vocab_size) for _ in range(num_tokens)]

        async def stream(times: list[float]) -> None:
            async for _ in client.generate(prompt(64), stream_params):
                times.append(time.monotonic())
                if all(len(others) >= QUIET_TOKENS for others in arrivals):
                    ready.set()
                if over.is_set():
                    return

        with nice_sessions():
            async with asyncio.TaskGroup() as group:
                for times in arrivals:
                    group.create_task(stream(times))
                await ready.wait()
                start_s = time.monotonic()
                await asyncio.gather(
                    *(
                        client.complete(prompt(PROMPT_TOKENS), prompt_params)
                        for _ in range(NUM_PROMPTS)
                    )
                )
                end_s = time.monotonic()
                over.set()
    gaps = [(after - before, after) for times in arrivals for before, after in pairwise(times)]
    quiet = sorted(gap * 1e3 for gap, when in gaps if when <= start_s)
    mixed = sorted(gap * 1e3 for gap, when in gaps if start_s < when <= end_s)
    return {
        "quiet_itl_ms_median": statistics.median(quiet),
        "mixed_itl_ms_median": statistics.median(mixed),
        "mixed_itl_ms_p95": mixed[int(0.95 * len(mixed))],
        "mixed_itl_ms_max": mixed[-1],
        "prompts_s": end_s - start_s,
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="small")
    parser.add_argument("--targets", default="inf,200,100", help="milliseconds, by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    name = arguments.model
    model = model_folder(name)
    targets = arguments.targets.split(",")
    rounds: dict[str, list[dict[str, float]]] = {target: [] for target in targets}
    for _ in range(arguments.rounds):
        for target in targets:
            rounds[target].append(asyncio.run(measure(model, float(target))))
    summary: dict[str, Any] = {}
    for target in targets:
        summary[target] = {
            figure: spread([result[figure] for result in rounds[target]])
            for figure in rounds[target][0]
        }
        line = ", ".join(
            f"{figure} {row['median']:.4g} ({row['min']:.4g}-{row['max']:.4g})"
            for figure, row in summary[target].items()
        )
        print(f"target {target} ms: {line}")
    record = {
        **describe_run(),
        "model": arguments.model,
        "targets": summary,
    }
    write_report(arguments.out, record)


if __name__ == "__main__":
    main()
