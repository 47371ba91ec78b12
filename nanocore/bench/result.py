"""The result of a run as `vllm bench serve` has it: its JSON keys, its files, its table.

Latency keys end in _ms; `ttfts`, `itls`, `latencies` and the like are seconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from nanocore.bench.arrivals import rate_changes
from nanocore.bench.load import Run
from nanocore.bench.opened import Opened
from nanocore.bench.serve_options import Report, ServeOptions
from nanocore.bench.statistics import Distribution, Samples, percentile_name, totals
from nanocore.protocol.errors import ConfigError

METRIC_NAMES: Final = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": (
        "E2EL incl. Client Queue",
        "Queue-inclusive End-to-end Latency",
    ),
}
DETAILS: Final = (
    "input_lens",
    "output_lens",
    "start_times",
    "ttfts",
    "itls",
    "generated_texts",
    "errors",
)
"""Keys that only --save-detailed writes."""
_WIDTH: Final = 50
_LINES: Final = {
    "completed": "Successful requests:",
    "failed": "Failed requests:",
    "max_concurrency": "Maximum request concurrency:",
    "request_rate": "Request rate configured (RPS):",
    "duration": "Benchmark duration (s):",
    "total_input_tokens": "Total input tokens:",
    "total_output_tokens": "Total generated tokens:",
    "request_throughput": "Request throughput (req/s):",
    "request_goodput": "Request goodput (req/s):",
    "output_throughput": "Output token throughput (tok/s):",
    "max_output_tokens_per_s": "Peak output token throughput (tok/s):",
    "max_concurrent_requests": "Peak concurrent requests:",
    "total_token_throughput": "Total token throughput (tok/s):",
}


def serve_result(
    options: ServeOptions, opened: Opened, run: Run, times_s: Sequence[float], began: datetime
) -> dict[str, Any]:
    """All keys, details included, in vLLM's order. began: when the run did."""
    report, outcomes = options.report, run.outcomes
    counts = asdict(totals(outcomes, run.duration_s, report.goodput_ms))
    peaks = {name: counts.pop(name) for name in ("max_output_tokens_per_s",
                                                 "max_concurrent_requests")}  # fmt: skip
    return {
        **_configuration(options, opened, began),
        "duration": run.duration_s,
        **counts,
        "input_lens": [each.num_prompt_tokens for each in outcomes],
        "output_lens": [0 if each.error else each.num_output_tokens for each in outcomes],
        "ttfts": [each.ttft_s for each in outcomes],
        "itls": [each.itls_s for each in outcomes],
        "latencies": [each.latency_s for each in outcomes],
        "start_times": [each.start_s for each in outcomes],
        "queue_times": [each.queue_s for each in outcomes],
        "generated_texts": [each.text for each in outcomes],
        "errors": [each.error for each in outcomes],
        **peaks,
        **_rate_changes(options, times_s, began),
        **_latencies(options, Samples.of(outcomes)),
    }


def _configuration(options: ServeOptions, opened: Opened, began: datetime) -> dict[str, Any]:
    traffic, backend = options.traffic, options.destination.backend
    configuration: dict[str, Any] = {
        "date": began.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": backend,
        "backend": backend,
        "label": options.report.label,
        "model_id": opened.model_id,
        "tokenizer_id": opened.tokenizer_id,
        "num_prompts": options.dataset.num_prompts,
        **options.report.metadata,
        "request_rate": "inf" if math.isinf(traffic.rate) else traffic.rate,
        "burstiness": traffic.burstiness,
        "max_concurrency": options.max_concurrency,
    }
    if (ramp := traffic.ramp) is not None:
        configuration |= {
            "ramp_up_strategy": ramp.strategy,
            "ramp_up_start_rps": ramp.start_rps,
            "ramp_up_end_rps": ramp.end_rps,
        }
    return configuration


def _rate_changes(
    options: ServeOptions, times_s: Sequence[float], began: datetime
) -> dict[str, Any]:
    ramp = options.traffic.ramp
    if ramp is None or options.self_timed:
        return {}
    changes = rate_changes(ramp.rates(len(times_s)), times_s)
    return {
        "rps_change_events": [
            {"rps": rps, "timestamp": (began + timedelta(seconds=time_s)).isoformat()}
            for rps, time_s in changes
        ]
    }


def _latencies(options: ServeOptions, samples: Samples) -> dict[str, float]:
    latencies = {}
    for name in options.report.percentile_metrics:
        if name == "client_queue_time" and options.max_concurrency is None:
            continue  # nothing waits on our side
        values_ms = [value * 1e3 for value in getattr(samples, name)]
        found = Distribution.of(values_ms, options.report.percentiles)
        latencies[f"mean_{name}_ms"] = found.mean
        latencies[f"median_{name}_ms"] = found.median
        latencies[f"std_{name}_ms"] = found.std
        for number, value in found.percentiles.items():
            latencies[f"{percentile_name(number)}_{name}_ms"] = value
    return latencies


def table(result: Mapping[str, Any]) -> str:
    """What is printed, as `vllm bench serve` prints it."""
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]
    for key, text in _LINES.items():
        value = result[key]
        if value is not None and value != "inf":
            lines.append(_line(text, value))
    for name, (short, long) in METRIC_NAMES.items():
        ending = f"_{name}_ms"
        own = {key.removesuffix(ending): key for key in result if key.endswith(ending)}
        if "mean" not in own:
            continue
        lines.append(f"{long:-^{_WIDTH}}")
        kinds = ("mean", "median", *(each for each in own if each.startswith("p")))
        lines += [_line(f"{kind.capitalize()} {short} (ms):", result[own[kind]]) for kind in kinds]
    return "\n".join([*lines, "=" * _WIDTH])


def _line(text: str, value: float) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{text:<40} {shown:<10}".rstrip()


def result_path(options: ServeOptions, result: Mapping[str, Any]) -> Path:
    """Where a result is written: the name that was given, or one made of what was measured."""
    report, traffic = options.report, options.traffic
    name = report.result_filename
    if name is None:
        rate = f"{traffic.rate}qps"
        if (ramp := traffic.ramp) is not None:
            rate = f"ramp-up-{ramp.strategy}-{ramp.start_rps:g}qps-{ramp.end_rps:g}qps"
        limit = options.max_concurrency
        name = "-".join(
            [
                report.label or result["backend"],
                rate + ("" if limit is None else f"-concurrency{limit}"),
                str(result["model_id"]).rstrip("/").rpartition("/")[2],
                f"{result['date']}.json",
            ]
        )
    return Path(report.result_dir or "") / name


def write_result(report: Report, path: Path, result: Mapping[str, Any]) -> None:
    """As one line, at the file's end with --append-result.

    Raises:
        ConfigError: the file cannot be written.
    """
    kept = result if report.save_detailed else {k: v for k, v in result.items() if k not in DETAILS}
    line = json.dumps(kept)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if report.append_result and path.exists() and path.stat().st_size:
            line = f"\n{line}"
        with path.open("a" if report.append_result else "w", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: the result is not written") from None
