"""What it costs a rank to sample with filters, next to a temperature alone, in microseconds.

    OMP_NUM_THREADS=1 nice -n -15 python benchmarks/sampling.py [--rounds 15]

From logits to tokens on the CPU, with the native kernels, on all cores. Logits are normal; flat
ones deviate by 0.05, so that every token matters, and peaked ones by 8. Cases take turns, and each
sampling has noise of its own; a ratio is of two medians of one run.
Writes benchmarks/results/sampling.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from machine import describe_run, nice_sessions, spread, write_report
from torch import Tensor

from nanocore.kernels.interface import Kernels
from nanocore.kernels.select import select_kernels
from nanocore.kernels.step_rows import TokenPlaces
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.communication.communicator import SingleRank
from nanocore.worker.plan import NewRow
from nanocore.worker.sampling.columns import RowColumns
from nanocore.worker.sampling.sampler import TokenSampler

RESULTS: Final = Path(__file__).parent / "results" / "sampling.json"
VOCAB_SIZES: Final = (2_048, 40_000, 152_064)
NUM_ROWS: Final = (1, 16, 256)
SHAPES: Final = {"flat": 0.05, "peaked": 8.0}
FILTERS: Final[dict[str, tuple[int, float, float]]] = {
    "temperature": (0, 1.0, 0.0),
    "top_k 50": (50, 1.0, 0.0),
    "top_k 1000": (1000, 1.0, 0.0),
    "top_p 0.95": (0, 0.95, 0.0),
    "top_p 0.5": (0, 0.5, 0.0),
    "min_p 0.05": (0, 1.0, 0.05),
    "top_k 50, top_p 0.95, min_p 0.05": (50, 0.95, 0.05),
}
"""top_k, top_p, min_p; the first has none, and is what the others are compared with."""
_MIN_LOGITS: Final = 1 << 20  # of one timing: small cases are repeated


def make_sampling(
    kernels: Kernels, logits_RV: Tensor, top_k: int, top_p: float, min_p: float
) -> Callable[[int], Tensor]:
    """Samples a token of each row; the argument is where it will be."""
    num_rows, vocab_size = logits_RV.shape
    columns = RowColumns(num_rows, vocab_size)
    sampling = EngineSamplingParams(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
    for row in range(num_rows):
        columns.set_row(
            NewRow(
                row=row, token_ids=b"", num_prompt_tokens=0, num_computed_tokens=0, block_ids=b"",
                sampling=sampling, seed=row,
            )
        )  # fmt: skip
    rows, rows_R = columns.of_rows(np.arange(num_rows)), torch.arange(num_rows)
    sampler = TokenSampler(0, vocab_size, SingleRank(), kernels)
    no_table = torch.zeros(0, 0, dtype=torch.int32)

    def sample(position: int) -> Tensor:
        places = TokenPlaces(no_table, rows_R, torch.full_like(rows_R, position))
        return sampler.sample(logits_RV, rows, places)

    return sample


@torch.inference_mode()
def measure(shape: str, vocab_size: int, num_rows: int, num_rounds: int) -> dict[str, Any]:
    """Of each filter median and range over the rounds, and the ratio to a temperature alone."""
    generator = torch.Generator().manual_seed(1)
    logits_RV = SHAPES[shape] * torch.randn(num_rows, vocab_size, generator=generator)
    kernels = select_kernels("cpu", torch.device("cpu"))
    samplings = {name: make_sampling(kernels, logits_RV, *f) for name, f in FILTERS.items()}
    num_repeats = max(1, _MIN_LOGITS // logits_RV.numel())
    figures: dict[str, list[float]] = {name: [] for name in samplings}
    for round_number in range(num_rounds):
        for name, sample in samplings.items():
            start_s = time.perf_counter()
            for i in range(num_repeats):
                sample(round_number * num_repeats + i)
            seconds = (time.perf_counter() - start_s) / num_repeats
            figures[name].append(round(seconds * 1e6, 1))
    summary = {name: spread(values) for name, values in figures.items()}
    for figure in summary.values():
        figure["ratio"] = round(figure["median"] / summary["temperature"]["median"], 3)
        del figure["values"]
    return summary


def table(cases: list[dict[str, Any]]) -> str:
    """A line for each case: a temperature alone in microseconds, and the ratios of the others."""
    names = list(FILTERS)
    lines = ["| logits, vocabulary, rows | " + " | ".join(names) + " |"]
    lines.append("|---" * (1 + len(names)) + "|")
    for case in cases:
        figures = case["figures"]
        cells = [f"{figures['temperature']['median']:,.0f} us"]
        cells += [f"{figures[name]['ratio']:.2f}" for name in names[1:]]
        what = f"{case['logits']}, {case['vocab_size']:,}, {case['rows']}"
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=VOCAB_SIZES)
    parser.add_argument("--rows", type=int, nargs="+", default=NUM_ROWS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    cases: list[dict[str, Any]] = []
    with nice_sessions():
        for vocab_size in arguments.vocab_sizes:
            for num_rows in arguments.rows:
                for shape in SHAPES:
                    figures = measure(shape, vocab_size, num_rows, arguments.rounds)
                    case = {"logits": shape, "vocab_size": vocab_size, "rows": num_rows}
                    cases.append({**case, "figures": figures})
    print(table(cases))
    write_report(arguments.out, {**describe_run(), "unit": "microseconds", "cases": cases})


if __name__ == "__main__":
    main()
