"""What rows that ask for everything cost a decode step of the demo model, in milliseconds.

    python benchmarks/sampled_step.py [--repeats 20]

Of 256 rows a few ask for all that changes how a token is chosen; next to steps of the same rows
without, alternately, in one process. Prints medians and their ratio, and writes
benchmarks/results/sampled_step.json.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
from report import describe_run, positive, spread, table, with_range, write_report

from nanocore.demo_model import demo_model_folder
from nanocore.engine_core.config import EngineConfig
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.plan import NewRow, SchedulerOutput
from nanocore.worker.worker import LocalExecutor

RESULTS: Final = Path(__file__).parent / "results"
NUM_ROWS: Final = 256
NUM_ASKING: Final = 16
NUM_STEPS: Final = 12
BLOCK_SIZE: Final = 16
NUM_PROMPT_TOKENS, NUM_TOKENS, NUM_BLOCKS = 96, 128, 12  # of each row, some of them output
LOGPROBS: Final = 5
STOPS: Final = [2, 3, 4]
PLAIN: Final = EngineSamplingParams(temperature=0.8)
EVERYTHING: Final = EngineSamplingParams(
    temperature=0.8, top_k=200, top_p=0.95, min_p=0.001, min_tokens=60, logprobs=LOGPROBS,
    repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1,
    allowed_token_ids=list(range(5, 1000)), logit_bias=[(i, 0.5) for i in range(100, 164)],
    bad_words_token_ids=[[i, i + 1, i + 2] for i in range(300, 332)] + [[40], [41]],
)  # fmt: skip


def step_ms(executor: LocalExecutor, num_asking: int) -> float:
    """One decode step, the mean of many, if so many rows ask for everything."""
    rng = np.random.default_rng(0)
    rows = [
        NewRow(
            row=row, token_ids=rng.integers(5, 1000, NUM_TOKENS).astype("<i4").tobytes(),
            num_prompt_tokens=NUM_PROMPT_TOKENS, num_computed_tokens=NUM_TOKENS - 1, seed=row,
            block_ids=np.arange(row * NUM_BLOCKS, (row + 1) * NUM_BLOCKS).astype("<i4").tobytes(),
            sampling=EVERYTHING if row % (NUM_ROWS // NUM_ASKING) < num_asking else PLAIN,
            stop_token_ids=STOPS,
        )
        for row in range(NUM_ROWS)
    ]  # fmt: skip
    run(executor, added=rows)
    start_s = time.perf_counter()
    for _ in range(NUM_STEPS):
        run(executor)
    spent_s = time.perf_counter() - start_s
    run(executor, removed=np.arange(NUM_ROWS).astype("<i4").tobytes(), num_tokens=0)
    return spent_s / NUM_STEPS * 1e3


def run(executor: LocalExecutor, added: list[NewRow] | None = None, removed: bytes = b"",
        num_tokens: int = NUM_ROWS) -> None:  # fmt: skip
    executor.submit(SchedulerOutput(
        step=0, removed_rows=removed, added=added or [], block_rows=b"", block_ids=b"",
        chunk_rows=b"", chunk_counts=b"", num_tokens=num_tokens,
    ))  # fmt: skip
    executor.collect()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=positive, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS / "sampled_step.json")
    arguments = parser.parse_args()
    folder = demo_model_folder()
    config = EngineConfig(device="cpu", block_size=BLOCK_SIZE, max_num_seqs=NUM_ROWS)
    executor = LocalExecutor(config.worker_config(str(folder), BLOCK_SIZE * NUM_BLOCKS))
    executor.load_model()
    executor.allocate_kv_cache(NUM_ROWS * NUM_BLOCKS, BLOCK_SIZE * NUM_BLOCKS)
    cases = {"plain": 0, f"{NUM_ASKING} rows ask for everything": 1}
    figures: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(arguments.repeats + 1):
        for name, num_asking in cases.items():
            value = step_ms(executor, num_asking)
            figures[name] += [value] if number else []  # the first one warms up
    plain, asking = map(median, figures.values())
    spreads = {name: spread(values) for name, values in figures.items()}
    print(table([["step of 256 rows, ms", ""], *([n, with_range(s)] for n, s in spreads.items())]))
    print(f"{asking / plain:.2f} times")
    report = {**describe_run(), "step_ms": spreads, "times": round(asking / plain, 4)}
    write_report(arguments.out, report)


if __name__ == "__main__":
    main()
