"""Where a step's time goes: kernels by kind, sampling, input preparation, and what is around it.

    nice -n -15 python benchmarks/breakdown.py --model small

A rank in this process runs steps like those of W5 (one stream), W1 (16 streams) and W2 (a chunk of
prompt), with its kernels timed one by one. An engine then runs the same workloads, and what its
steps take beyond the rank's is the scheduler, the wire and the client, as far as they do not
overlap with steps. The engine's threads are watched for context switches meanwhile.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from machine import BandwidthCanary, describe_run, nice_sessions, spread, write_report
from models import SHAPES, model_folder
from offline import generate
from workloads import Workload, make_workload

from nanocore.client import LLM
from nanocore.engine_core.config import EngineConfig
from nanocore.kernels.cpu.cpu_backend import Captured
from nanocore.protocol.sampling import EngineSamplingParams
from nanocore.worker.plan import NewRow, SchedulerOutput
from nanocore.worker.worker import Worker

RESULTS: Final = Path(__file__).parent / "results"
BLOCK_SIZE: Final = 16
NUM_BLOCKS: Final = 2048
MAX_MODEL_LEN: Final = 2048
GREEDY: Final = EngineSamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Case:
    """rows of a step, each with `context` tokens, of which `count` are computed in it."""

    workload: str
    rows: int
    context: int
    count: int
    num_steps: int


CASES: Final = (
    Case("W5", rows=1, context=192, count=1, num_steps=64),
    Case("W1", rows=16, context=192, count=1, num_steps=48),
    Case("W2", rows=2, context=1024, count=1024, num_steps=3),
)


class Stopwatch:
    """Seconds spent in methods of objects, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Measure this object's method from now on."""
        original: Callable[..., Any] = getattr(owner, method)
        times = self.seconds.setdefault(name, [])

        def measured(*args: Any) -> Any:
            start_s = time.perf_counter()
            result = original(*args)
            times.append(time.perf_counter() - start_s)
            return result

        setattr(owner, method, measured)


def main() -> None:
    """Parse the command line, measure, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="small", help=f"folder, or one of {', '.join(SHAPES)}")
    parser.add_argument("--quantization", help="as of nanocore-engine")
    parser.add_argument("--cases", default="W5,W1,W2", help="of W5, W1, W2")
    parser.add_argument("--out", type=Path, help="default: results/breakdown-MODEL.json")
    arguments = parser.parse_args()
    folder, name = model_folder(arguments.model), Path(arguments.model).name
    report = {**describe_run(), "model": name, "quantization": arguments.quantization}
    cases = [case for case in CASES if case.workload in arguments.cases.split(",")]
    report["canary_gb_per_s"] = BandwidthCanary().measure()
    with nice_sessions():
        rank = {case.workload: run_rank(folder, case, arguments.quantization) for case in cases}
        engine = run_engine(folder, cases, arguments.quantization)
    report["cases"] = {key: {**rank[key], **engine[key]} for key in rank}
    print(table(report["cases"]))
    write_report(arguments.out or RESULTS / f"breakdown-{name}.json", report)


def run_rank(folder: str | Path, case: Case, quantization: str | None) -> dict[str, Any]:
    """Milliseconds of the parts of a step."""
    config = EngineConfig(
        quantization=quantization,  # type: ignore[arg-type]
        kv_cache_memory_bytes=1,
        max_num_seqs=64,
    )
    worker = Worker(config.worker_config(str(folder), MAX_MODEL_LEN))
    worker.load_model()
    worker.allocate_kv_cache(NUM_BLOCKS, MAX_MODEL_LEN)
    worker.capture()
    runner, watch = worker._runner, Stopwatch()
    assert isinstance(runner._replay, Captured), "steps of this model are not captured"
    vocab_size = runner.config.vocab_size
    width = -(-(case.context + case.num_steps + 2) // BLOCK_SIZE)
    step = 0

    def execute(added: list[NewRow]) -> float:
        nonlocal step
        chunk = np.arange(case.rows if case.count > 1 else 0, dtype="<i4")
        plan = SchedulerOutput(
            step=step,
            removed_rows=np.arange(case.rows if step and added else 0, dtype="<i4").tobytes(),
            added=added,
            block_rows=b"",
            block_ids=b"",
            chunk_rows=chunk.tobytes(),
            chunk_counts=np.full(len(chunk), case.count, "<i4").tobytes(),
            num_tokens=case.rows * case.count,
        )
        step += 1
        start_s = time.perf_counter()
        worker.begin(plan).wait()
        return time.perf_counter() - start_s

    def new_rows() -> list[NewRow]:
        rng = np.random.default_rng(step)
        return [
            NewRow(
                row=row,
                token_ids=rng.integers(0, vocab_size, case.context).astype("<i4").tobytes(),
                num_prompt_tokens=case.context,
                num_computed_tokens=case.context - case.count,
                block_ids=np.arange(row * width, (row + 1) * width, dtype="<i4").tobytes(),
                sampling=GREEDY,
                seed=0,
            )
            for row in range(case.rows)
        ]

    execute(new_rows())
    fresh = case.count > 1  # a chunk is computed again and again; decodes go on
    execute(new_rows() if fresh else [])
    watch.watch(runner.batch, "apply", "input_preparation")
    watch.watch(runner.batch, "advance", "input_preparation")
    watch.watch(runner.batch, "inputs", "input_preparation")
    watch.watch(runner.batch, "append", "input_preparation")
    watch.watch(runner.sampler, "sample", "sampling")
    runner._replay.program.profile()
    steps_s = [execute(new_rows() if fresh else []) for _ in range(case.num_steps)]
    parts = {name: sum(times) for name, times in watch.seconds.items()}
    parts |= runner._replay.program.profile()
    parts["other"] = sum(steps_s) - sum(parts.values())
    return {
        "step_ms": spread([1e3 * seconds for seconds in steps_s]),
        "mean_ms": {name: 1e3 * seconds / case.num_steps for name, seconds in parts.items()},
    }


def run_engine(
    folder: str | Path, cases: list[Case], quantization: str | None
) -> dict[str, dict[str, Any]]:
    """Wall time of a step of each whole workload, and its context switches."""
    flags: dict[str, Any] = {"quantization": quantization} if quantization else {}
    results = {}
    with LLM(folder, max_model_len=MAX_MODEL_LEN, **flags) as llm, nice_sessions():
        for case in cases:
            walls_ms, switches = [], []
            for repetition in range(4):
                workload = make_workload(case.workload, llm.model_card.vocab_size, repetition)
                wall_ms, num_switches = _run_once(llm, workload)
                if repetition:
                    walls_ms.append(wall_ms)
                    switches.append(num_switches)
            results[case.workload] = {
                "engine_step_ms": spread(walls_ms),
                "context_switches_per_step": spread(switches),
            }
    return results


def _run_once(llm: LLM, workload: Workload) -> tuple[float, float]:
    before, switches = llm.stats().num_steps, _context_switches()
    wall_s, _ = generate(llm, workload.requests)
    num_steps = llm.stats().num_steps - before
    return 1e3 * wall_s / num_steps, (_context_switches() - switches) / num_steps


def _context_switches() -> int:
    """Of all threads of our child processes so far, voluntary and not."""
    total = 0
    for children in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        for pid in children.read_text().split():
            for status in Path(f"/proc/{pid}/task").glob("*/status"):
                lines = (line for line in status.read_text().splitlines() if "ctxt" in line)
                total += sum(int(line.split()[1]) for line in lines)
    return total


def table(cases: dict[str, dict[str, Any]]) -> str:
    """Markdown: a column for each workload, the parts as shares of the rank's step."""
    names = sorted({name for case in cases.values() for name in case["mean_ms"]})
    lines = [f"| | {' | '.join(cases)} |", "|---" * (len(cases) + 1) + "|"]
    for name in names:
        cells = []
        for case in cases.values():
            part, whole = case["mean_ms"].get(name, 0.0), sum(case["mean_ms"].values())
            cells.append(f"{part:.3f} ms, {100 * part / whole:.1f} %")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for key, what in (
        ("step_ms", "the rank's step, ms"),
        ("engine_step_ms", "the engine's, ms"),
        ("context_switches_per_step", "context switches a step"),
    ):
        cells = [f"{c[key]['median']:.2f} ({c[key]['min']:.2f}-{c[key]['max']:.2f})"
                 for c in cases.values()]  # fmt: skip
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
