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
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from machine import (
    BandwidthCanary,
    CpuTimes,
    describe_run,
    nice_sessions,
    spread,
    write_report,
)
from models import SHAPES, model_folder
from workloads import WORKLOAD_NAMES, BenchmarkRequest, Workload, make_workload, workload_names

from nanocore.client import LLM
from nanocore.client.outputs import RequestOutput
from nanocore.engine_core.cli import parse_config
from nanocore.engine_core.config import EngineConfig
from nanocore.protocol.errors import ConfigError
from nanocore.protocol.sampling import SamplingParams

_RESULTS = Path(__file__).resolve().parent / "results"
_WARM_UP = 0  # the repetition that is not recorded
_SPREAD_METRICS = {
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
"""What is recorded of each repetition, and its heading in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """One run of a workload. ttft_ms, tpot_ms: medians over its requests.

    canary_gb_per_s: the lower of two reads, before and after. request_ttft_ms, request_tpot_ms: of
    each request, in the order of submission.
    """

    wall_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: float
    tpot_ms: float
    prefix_cache_hit_rate: float
    num_steps: int
    num_preemptions: int
    foreign_cpu_share: float
    canary_gb_per_s: float
    request_ttft_ms: list[float]
    request_tpot_ms: list[float]


def main() -> None:
    """Parse the command line, run, report."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that `with` cleans up
    arguments, config = _parse_arguments()
    model_name = Path(arguments.model).name
    folder = model_folder(arguments.model)
    report = _describe_run(model_name, config)
    start_s = time.perf_counter()
    with LLM(folder, **engine_arguments(config)) as llm:
        report["engine_start_s"] = round(time.perf_counter() - start_s, 3)
        card = llm.model_card
        report["engine"] |= {"dtype": card.dtype, "max_model_len": card.max_model_len,
                             "num_blocks": card.num_blocks}  # fmt: skip
        with nice_sessions():
            runs = _run_rounds(llm, arguments.workloads, arguments.reps, arguments.warmup)
    report["workloads"] = {
        name: _summarize(make_workload(name, card.vocab_size, _WARM_UP), repetitions)
        for name, repetitions in runs.items()
    }
    print(_table(report["workloads"]))
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
    parser.add_argument("--model", default="small", help=f"folder, or one of {', '.join(SHAPES)}")
    parser.add_argument("--workloads", type=workload_names, default=list(WORKLOAD_NAMES),
                        metavar="W1,W2,...")  # fmt: skip
    parser.add_argument("--reps", type=int, default=3, help="repetitions (default: 3)")
    parser.add_argument("--warmup", action=argparse.BooleanOptionalAction, default=True,
                        help="run each workload once before recording")  # fmt: skip
    parser.add_argument("--out", type=Path, help="default: results/offline-MODEL.json beside this")
    arguments, engine_flags = parser.parse_known_args()
    if arguments.reps < 1:
        parser.error("--reps: at least 1")
    if arguments.model not in SHAPES and not Path(arguments.model).is_dir():
        parser.error(f"--model {arguments.model}: no folder, and not one of {', '.join(SHAPES)}")
    try:
        config = parse_config(engine_flags)
    except ConfigError as error:
        parser.error(str(error))
    if config.listen:
        parser.error("--listen: the benchmark starts an engine of its own")
    return arguments, config


def engine_arguments(config: EngineConfig) -> dict[str, Any]:
    """What differs from the engine's defaults, as LLM takes it."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return {name: value for name, value in values.items() if value != getattr(EngineConfig(), name)}


def _describe_run(model_name: str, config: EngineConfig) -> dict[str, Any]:
    """All that must be known to read the figures, without this machine's paths."""
    settings = asdict(config)
    for name in ("model", "listen", "step_trace"):
        del settings[name]
    return {
        **describe_run(),
        "model": model_name,
        "engine": settings,
    }


def _run_rounds(
    llm: LLM, names: list[str], num_repetitions: int, warm_up: bool
) -> dict[str, list[Repetition]]:
    """Run all workloads in turn, round after round."""
    canary = BandwidthCanary()
    runs: dict[str, list[Repetition]] = {name: [] for name in names}
    for repetition in range(_WARM_UP if warm_up else 1, num_repetitions + 1):
        for name in names:
            workload = make_workload(name, llm.model_card.vocab_size, repetition)
            result = _run_once(llm, workload, canary)
            if repetition != _WARM_UP:
                runs[name].append(result)
            label = "warm-up" if repetition == _WARM_UP else f"rep {repetition}"
            print(f"{name} {label}: {result.wall_s:.2f} s", file=sys.stderr, flush=True)
    return runs


def _run_once(llm: LLM, workload: Workload, canary: BandwidthCanary) -> Repetition:
    """Run a workload, with the engine's counters and the machine's noise around it."""
    bandwidth = canary.measure()
    stats, cpu_times = llm.stats(), CpuTimes.now()
    wall_s, outputs = generate(llm, workload.requests)
    foreign_share, after = CpuTimes.now().foreign_share_since(cpu_times), llm.stats()
    bandwidth = min(bandwidth, canary.measure())
    _check_outputs(workload, outputs)

    num_out = workload.num_output_tokens
    num_queried = after.prefix_cache_queries - stats.prefix_cache_queries
    num_hit = after.prefix_cache_hits - stats.prefix_cache_hits
    ttft_ms, tpot_ms = latencies_ms(outputs)
    return Repetition(
        wall_s=wall_s,
        output_tokens_per_s=num_out / wall_s,
        total_tokens_per_s=(workload.num_prompt_tokens + num_out) / wall_s,
        ttft_ms=median(ttft_ms),
        tpot_ms=median(tpot_ms),
        prefix_cache_hit_rate=num_hit / num_queried if num_queried else 0.0,
        num_steps=after.num_steps - stats.num_steps,
        num_preemptions=after.num_preemptions - stats.num_preemptions,
        foreign_cpu_share=foreign_share,
        canary_gb_per_s=bandwidth,
        request_ttft_ms=ttft_ms,
        request_tpot_ms=tpot_ms,
    )


def generate(llm: LLM, requests: Sequence[BenchmarkRequest]) -> tuple[float, list[RequestOutput]]:
    """`submit` to an engine without cached prefixes."""
    if not llm.reset_prefix_cache():
        raise RuntimeError("the engine did not reset its prefix cache: is a request running?")
    return submit(llm, requests)


def submit(llm: LLM, requests: Sequence[BenchmarkRequest]) -> tuple[float, list[RequestOutput]]:
    """Submit requests at once; seconds until the last one's end, and outputs."""
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


def _summarize(workload: Workload, repetitions: list[Repetition]) -> dict[str, Any]:
    """A workload's part of the report."""
    summary: dict[str, Any] = {
        "description": workload.description,
        "num_requests": len(workload.requests),
        "num_prompt_tokens": workload.num_prompt_tokens,
        "num_output_tokens": workload.num_output_tokens,
    }
    for metric in (*_SPREAD_METRICS, "num_preemptions"):
        values = [round(getattr(repetition, metric), 4) for repetition in repetitions]
        summary[metric] = spread(values)
    for metric in ("request_ttft_ms", "request_tpot_ms"):
        summary[metric] = [getattr(repetition, metric) for repetition in repetitions]
    return summary


def _table(workloads: dict[str, dict[str, Any]]) -> str:
    """Medians with their range, aligned."""
    rows = [["", *_SPREAD_METRICS.values()]]
    for name, summary in workloads.items():
        rows.append([name, *(_with_range(summary[metric]) for metric in _SPREAD_METRICS)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def _with_range(spread: dict[str, Any]) -> str:
    digits = 2 if spread["max"] < 20 else 0
    middle, low, high = (f"{spread[key]:.{digits}f}" for key in ("median", "min", "max"))
    return middle if low == high else f"{middle} ({low}-{high})"


if __name__ == "__main__":
    main()
