"""What it costs a rank to turn a plan into a step's inputs, in microseconds.

    OMP_NUM_THREADS=1 nice -n -15 python benchmarks/preparation.py [--rounds 30]

The persistent batch's part of a step: take in the plan, make the inputs, and the sampling columns.
Plans are made up, with block crossings spread evenly over steps; a figure is the mean of 32 steps.

decode  every row takes one token; rows 0 to n - 1, as while nothing ends
gaps    the same for every second of 2 n rows, as after others have ended
ends    as gaps, and one of the rows ends in each step, so that what follows from the set of rows is
        made anew
chunk   one row takes 2,048 tokens of its prompt

Cases take turns. Writes benchmarks/results/preparation.json.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from machine import describe_run, nice_sessions, spread, write_report

from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.batch.input_batch import InputBatch
from nanocore.worker.plan import NewRow, SchedulerOutput

RESULTS: Final = Path(__file__).parent / "results" / "preparation.json"
BLOCK_SIZE: Final = 16
MAX_MODEL_LEN: Final = 32768 + 4096
VOCAB_SIZE: Final = 151_936
NUM_STEPS: Final = 32
CHUNK_TOKENS: Final = 2048
CONTEXTS: Final = (128, 2048, 16384, 32768)
NUM_ROWS: Final = (1, 64, 256)
_now_ns = time.perf_counter_ns


@dataclass(frozen=True, slots=True)
class Case:
    """kind: see above. context: tokens of each row before the measured steps, about."""

    kind: str
    num_rows: int
    context: int

    @property
    def name(self) -> str:
        """The key in the report."""
        return f"{self.kind}_{self.num_rows}_rows_at_{self.context}"


CASES: Final = [
    *(Case("decode", n, context) for n in NUM_ROWS for context in CONTEXTS),
    *(Case("gaps", n, context) for n in NUM_ROWS[1:] for context in CONTEXTS),
    *(Case("ends", n, context) for n in NUM_ROWS[1:] for context in CONTEXTS),
    *(Case("chunk", 1, context) for context in CONTEXTS),
]


@torch.inference_mode()
def measure_us(case: Case) -> float:
    """One step of this case, the mean of several."""
    is_chunk, num_rows = case.kind == "chunk", case.num_rows
    has_gaps = case.kind in ("gaps", "ends")
    rows = list(range(0, num_rows * 2, 2) if has_gaps else range(num_rows))
    batch = InputBatch(rows[-1] + 1, MAX_MODEL_LEN, BLOCK_SIZE, VOCAB_SIZE)
    # Contexts differ by up to a block, so that in each step some rows cross into a new one.
    lengths = {
        row: case.context + (0 if is_chunk else i % BLOCK_SIZE) for i, row in enumerate(rows)
    }
    added = [_new_row(row, length, CHUNK_TOKENS * is_chunk) for row, length in lengths.items()]
    batch.apply(_plan(0, added=added))
    plans = [_chunk_plan()] * NUM_STEPS
    if not is_chunk:
        plans = [_decode_plan(step, lengths, case.kind == "ends") for step in range(NUM_STEPS)]
    spent_ns = 0
    for plan in plans:
        t0 = _now_ns()
        batch.apply(plan)
        step = batch.advance(plan)
        batch.inputs(step)
        batch.sampled_rows(step)
        batch.places(step)
        spent_ns += _now_ns() - t0
        if is_chunk:
            batch.num_computed[:] = case.context  # the same chunk again
        else:
            assert len(step.sample_rows) == plan.num_tokens
            batch.append(step.sample_rows, np.ones(plan.num_tokens, np.int64))
    return spent_ns / 1e3 / NUM_STEPS


def _new_row(row: int, num_computed: int, num_chunk_tokens: int) -> NewRow:
    """A row that has computed so much; its blocks are full up to there, at least."""
    num_tokens = num_computed + max(1, num_chunk_tokens)
    num_blocks = -(-(num_computed + num_chunk_tokens) // BLOCK_SIZE)
    return NewRow(
        row=row,
        token_ids=bytes(4 * num_tokens),
        num_prompt_tokens=num_tokens,
        num_computed_tokens=num_computed,
        block_ids=bytes(4 * num_blocks),
        sampling=EngineSamplingParams(temperature=0.7, top_p=0.95, max_tokens=1000),
        seed=row,
    )


def _decode_plan(step: int, lengths: dict[int, int], one_ends: bool) -> SchedulerOutput:
    """One token for each row, and a block for those whose last one is full."""
    removed = [lengths.popitem()[0]] if one_ends else []
    rows = [row for row, length in lengths.items() if (length + step) % BLOCK_SIZE == 0]
    return _plan(len(lengths), removed_rows=_column(removed), block_rows=_column(rows))


def _chunk_plan() -> SchedulerOutput:
    return _plan(CHUNK_TOKENS, chunk_rows=_column([0]), chunk_counts=_column([CHUNK_TOKENS]))


def _plan(
    num_tokens: int,
    *,
    added: list[NewRow] | None = None,
    removed_rows: bytes = b"",
    block_rows: bytes = b"",
    chunk_rows: bytes = b"",
    chunk_counts: bytes = b"",
) -> SchedulerOutput:
    return SchedulerOutput(
        step=1, removed_rows=removed_rows, added=added or [],
        block_rows=block_rows, block_ids=block_rows,
        chunk_rows=chunk_rows, chunk_counts=chunk_counts, num_tokens=num_tokens,
    )  # fmt: skip


def _column(values: list[int]) -> bytes:
    return np.array(values, "<i4").tobytes()


def measure(cases: list[Case], num_rounds: int) -> dict[str, dict[str, Any]]:
    """Of each case median and range over the rounds."""
    figures: dict[str, list[float]] = {case.name: [] for case in cases}
    for _ in range(num_rounds):
        for case in cases:
            figures[case.name].append(round(measure_us(case), 2))
    return {name: spread(values) for name, values in figures.items()}


def table(summary: dict[str, dict[str, Any]]) -> str:
    """A line for each kind and number of rows, a column for each context."""
    lines = ["| us, median (least) | " + " | ".join(f"{c:,} tokens" for c in CONTEXTS) + " |"]
    lines.append("|---" * (1 + len(CONTEXTS)) + "|")
    for kind, num_rows in dict.fromkeys((case.kind, case.num_rows) for case in CASES):
        rows = (summary[Case(kind, num_rows, context).name] for context in CONTEXTS)
        cells = " | ".join(f"{row['median']:.0f} ({row['min']:.0f})" for row in rows)
        lines.append(f"| {kind}, {num_rows} rows | {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with nice_sessions():
        summary = measure(CASES, arguments.rounds)
    print(table(summary))
    write_report(arguments.out, {**describe_run(), "unit": "microseconds", "cases": summary})


if __name__ == "__main__":
    main()
