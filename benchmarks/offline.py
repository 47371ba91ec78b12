"""Offline throughput and latency of one engine on the workloads W1 to W5.

    python benchmarks/offline.py --model small

Starts an engine through `nanocore.client.LLM`, runs rounds of all workloads after a warm-up, prints
a table and writes every figure as JSON. Workloads alternate, so that a noisy minute costs each of
them one repetition and leaves the medians alone. Flags of `nanocore-engine` are passed through.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median
from typing import Any, Final

from models import SHAPES, model_folder
from noise import NoiseMeter, nice_sessions
from report import describe_run, spread, table, with_range, write_report
from workloads import WORKLOAD_NAMES, BenchmarkRequest, Workload, make_workload, workload_names

from nanocore.client import LLM
from nanocore.client.outputs import RequestOutput
from nanocore.engine_core.cli import parse_config
from nanocore.engine_core.config import EngineConfig
from nanocore.protocol.errors import ConfigError
from nanocore.protocol.sampling import SamplingParams

_RESULTS: Final = Path(__file__).resolve().parent / "results"
_WARM_UP: Final = 0  # the repetition that is not recorded
_HEADINGS: Final = {
    "wall_s": "wall s",
    "output_tokens_per_s": "output tok/s",
    "total_tokens_per_s": "total tok/s",
    "ttft_ms": "TTFT ms",
    "tpot_ms": "TPOT ms",
    "prefix_cache_hit_rate": "hit rate",
    "num_steps": "steps",
    "foreign_cpu_share": "foreign CPU",
    "canary_gb_per_s": "canary GB/s",
}
"""Of the figures in the table. ttft_ms, tpot_ms: medians over a repetition's requests."""


def main() -> None:
    """Parse the command line, run, report."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that `with` cleans up
    arguments, config = _parse_arguments()
    model_name = Path(arguments.model).name
    report = {**describe_run(), "model": model_name, "engine": asdict(config)}
    for name in ("model", "listen", "step_trace"):  # paths of this machine
        del report["engine"][name]
    start_s = time.perf_counter()
    with LLM(model_folder(arguments.model), **engine_arguments(config)) as llm:
        report["engine_start_s"] = round(time.perf_counter() - start_s, 3)
        card = llm.model_card
        report["engine"] |= {"dtype": card.dtype, "max_model_len": card.max_model_len,
                             "num_blocks": card.num_blocks}  # fmt: skip
        with nice_sessions():
            runs = _run_rounds(llm, arguments.workloads, arguments.reps)
    report["workloads"] = {
        name: {**workload.describe(), **{key: spread([run[key] for run in own]) for key in own[0]}}
        for name, (workload, own) in runs.items()
    }
    rows = [["", *_HEADINGS.values()]]
    for name, figures in report["workloads"].items():
        rows.append([name, *(with_range(figures[key]) for key in _HEADINGS)])
    print(table(rows))
    out = arguments.out or _RESULTS / f"offline-{model_name}.json"
    write_report(out, report)
    print(f"written to {out}")


def _parse_arguments() -> tuple[argparse.Namespace, EngineConfig]:
    """Our own arguments, and the engine's configuration from all others."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="All other flags go to nanocore-engine, e.g. --max-num-seqs 32.",
        allow_abbrev=False,
    )
    add_workload_arguments(parser)
    parser.add_argument("--out", type=Path, help="default: results/offline-MODEL.json beside this")
    arguments, engine_flags = parser.parse_known_args()
    check_workload_arguments(parser, arguments)
    try:
        config = parse_config(engine_flags)
    except ConfigError as error:
        parser.error(str(error))
    if config.listen:
        parser.error("--listen: the benchmark starts an engine of its own")
    return arguments, config


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that choose model, workloads and repetitions; compare.py has them, too."""
    parser.add_argument("--model", default="small", help=f"folder, or one of {', '.join(SHAPES)}")
    parser.add_argument("--workloads", type=workload_names, default=list(WORKLOAD_NAMES),
                        metavar="W1,W2,...")  # fmt: skip
    parser.add_argument("--reps", type=int, default=3, help="repetitions (default: 3)")


def check_workload_arguments(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace
) -> None:
    """End with a usage error where they make no sense."""
    if arguments.reps < 1:
        parser.error(f"--reps {arguments.reps}: at least 1")
    if arguments.model not in SHAPES and not Path(arguments.model).is_dir():
        parser.error(f"--model {arguments.model}: no folder, and not one of {', '.join(SHAPES)}")


def engine_arguments(config: EngineConfig) -> dict[str, Any]:
    """What differs from the engine's defaults, as LLM takes it."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return {name: value for name, value in values.items() if value != getattr(EngineConfig(), name)}


def _run_rounds(
    llm: LLM, names: list[str], num_repetitions: int
) -> dict[str, tuple[Workload, list[dict[str, float]]]]:
    """Run all workloads in turn, round after round; the figures of each repetition."""
    meter = NoiseMeter()
    vocab_size = llm.model_card.vocab_size
    runs: dict[str, tuple[Workload, list[dict[str, float]]]] = {
        name: (make_workload(name, vocab_size, _WARM_UP), []) for name in names
    }
    for repetition in range(_WARM_UP, num_repetitions + 1):
        for name in names:
            figures = _run_once(llm, make_workload(name, vocab_size, repetition), meter)
            if repetition != _WARM_UP:
                runs[name][1].append(figures)
            label = "warm-up" if repetition == _WARM_UP else f"rep {repetition}"
            print(f"{name} {label}: {figures['wall_s']:.2f} s", file=sys.stderr, flush=True)
    return runs


def _run_once(llm: LLM, workload: Workload, meter: NoiseMeter) -> dict[str, float]:
    """Run a workload, with the engine's counters and the machine's noise around it."""
    with meter.beside() as noise:
        before = llm.stats()
        wall_s, outputs = generate(llm, workload.requests)
        after = llm.stats()
    _check_outputs(workload, outputs)
    num_out = workload.num_output_tokens
    num_queried = after.prefix_cache_queries - before.prefix_cache_queries
    num_hit = after.prefix_cache_hits - before.prefix_cache_hits
    ttft_ms, tpot_ms = latencies_ms(outputs)
    return {
        "wall_s": wall_s,
        "output_tokens_per_s": num_out / wall_s,
        "total_tokens_per_s": (workload.num_prompt_tokens + num_out) / wall_s,
        "ttft_ms": median(ttft_ms),
        "tpot_ms": median(tpot_ms),
        "prefix_cache_hit_rate": num_hit / num_queried if num_queried else 0.0,
        "num_steps": after.num_steps - before.num_steps,
        "num_preemptions": after.num_preemptions - before.num_preemptions,
        **asdict(noise),
    }


def generate(llm: LLM, requests: Sequence[BenchmarkRequest]) -> tuple[float, list[RequestOutput]]:
    """Submit requests at once, with no cached prefixes; seconds until the last end, and outputs."""
    if not llm.reset_prefix_cache():
        raise RuntimeError("the engine did not reset its prefix cache: is a request running?")
    prompts = [list(request.prompt_token_ids) for request in requests]
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=request.num_output_tokens,
            ignore_eos=True,
            detokenize=False,
        )
        for request in requests
    ]
    start_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start_s, outputs


def _check_outputs(workload: Workload, outputs: list[RequestOutput]) -> None:
    """Figures count only if every request did all of its work."""
    for request, output in zip(workload.requests, outputs, strict=True):
        completion = output.outputs[0]
        wanted, found = request.num_output_tokens, len(completion.token_ids)
        if completion.finish_reason != "length" or found != wanted:
            raise RuntimeError(
                f"{workload.name}: a request ended with {found} of {wanted} tokens and "
                f"finish_reason {completion.finish_reason!r}"
            )


def latencies_ms(outputs: list[RequestOutput]) -> tuple[list[float], list[float]]:
    """Time to first token, and mean time of each token after it, of every request."""
    ttft_ms, tpot_ms = [], []
    for metrics in (output.metrics for output in outputs):
        first_s = metrics.time_to_first_token_s
        assert first_s is not None, "a request that ended by length has a first token"
        num_intervals = metrics.num_output_tokens - 1
        ttft_ms.append(round(first_s * 1e3, 3))
        tpot_ms.append(round((metrics.e2e_latency_s - first_s) * 1e3 / num_intervals, 3))
    return ttft_ms, tpot_ms


if __name__ == "__main__":
    main()
