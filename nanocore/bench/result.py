"""Result of a run, as in `vllm bench serve`: its JSON keys, its file, and its table.

Keys that end in _ms are milliseconds; `ttfts`, `itls` and `latencies` are seconds. Failed requests
only count as failed. Standard deviations are of the population; percentiles interpolate linearly; a
metric without values is 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from nanocore.bench.load import LoadRun, Outcome
from nanocore.bench.serve_flags import METRIC_NAMES, LoadOptions
from nanocore.bench.targets import DraftCounts, OpenTarget
from nanocore.protocol.errors import ConfigError

DETAILS: Final = (
    "input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors",
)  # fmt: skip
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


_DRAFT_LINES: Final = {
    "spec_decode_acceptance_rate": "Acceptance rate (%):",
    "spec_decode_acceptance_length": "Acceptance length:",
    "spec_decode_num_drafts": "Drafts:",
    "spec_decode_draft_tokens": "Draft tokens:",
    "spec_decode_accepted_tokens": "Accepted tokens:",
}


def distribution(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Return mean, median, std and percentiles (p99, p99.9)."""
    column = np.asarray(values or [0.0], dtype=np.float64)
    found = {"mean": np.mean(column), "median": np.median(column), "std": np.std(column)}
    for number in percentiles:
        name = f"p{int(number) if number == int(number) else number}"
        found[name] = np.percentile(column, number)
    return {name: float(value) for name, value in found.items()}


def succeeded(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [each for each in outcomes if not each.error]


def latencies_s(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Return all values of each metric, from requests that succeeded."""
    good = succeeded(outcomes)
    return {
        "ttft": [each.ttft_s for each in good],
        "tpot": [tpot_s for each in good if (tpot_s := each.tpot_s) is not None],
        "itl": [gap_s for each in good for gap_s in each.itls_s],
        "e2el": [each.latency_s for each in good],
        "client_queue_time": [each.queue_s for each in good],
        "e2el_including_client_queue": [each.latency_s + each.queue_s for each in good],
    }


Counts = npt.NDArray[np.int64]


def per_second(outcomes: Sequence[Outcome]) -> tuple[Counts, Counts]:
    """Return how many tokens arrived, and how many requests ran, in each second.

    Seconds count from the first request that succeeded; there is at least one.
    """
    good = succeeded(outcomes)
    start_s = min([each.start_s for each in good], default=0.0)
    length = 1 + int(max([each.end_s for each in good], default=0.0) - start_s)
    num_tokens = np.zeros(length, dtype=np.int64)
    changes = np.zeros(length + 1, dtype=np.int64)
    for each in good:
        seconds = (np.asarray(each.chunk_times_s) - start_s).astype(np.int64)
        np.add.at(num_tokens, seconds, each.chunk_tokens)
        changes[int(each.start_s - start_s)] += 1
        changes[int(each.end_s - start_s) + 1] -= 1
    return num_tokens, np.cumsum(changes[:-1])


def totals(
    outcomes: Sequence[Outcome], duration_s: float, goodput_ms: Mapping[str, float]
) -> dict[str, float | None]:
    """Return counts, and rates over the duration. goodput_ms: limits of ttft, tpot or e2el."""
    good = succeeded(outcomes)
    num_input = sum(each.num_prompt_tokens for each in good)
    num_output = sum(each.num_output_tokens for each in good)
    num_within = sum(is_within(each, goodput_ms) for each in good)
    return {
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration_s,
        "request_goodput": num_within / duration_s if goodput_ms else None,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
    }


def is_within(outcome: Outcome, goodput_ms: Mapping[str, float]) -> bool:
    """Whether a request kept all limits. A request of one token has a TPOT of 0."""
    measured_s = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s or 0.0, "e2el": outcome.latency_s}
    return all(measured_s[name] * 1e3 <= most_ms for name, most_ms in goodput_ms.items())


def serve_result(
    options: LoadOptions, opened: OpenTarget, run: LoadRun, now: datetime
) -> dict[str, Any]:
    """Return all keys, details included, in vLLM's order. now: the start of the run."""
    outcomes, traffic = run.outcomes, options.traffic
    num_tokens, num_requests = per_second(outcomes)
    result: dict[str, Any] = {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": options.destination.backend,
        "backend": options.destination.backend,
        "label": options.label,
        "model_id": opened.model_id,
        "tokenizer_id": opened.tokenizer_id,
        "num_prompts": options.dataset.num_prompts,
        **options.metadata,
        "request_rate": "inf" if math.isinf(traffic.rate) else traffic.rate,
        "burstiness": traffic.burstiness,
        "max_concurrency": options.max_concurrency,
        "duration": run.duration_s,
        **totals(outcomes, run.duration_s, options.goodput_ms),
        "input_lens": [each.num_prompt_tokens for each in outcomes],
        "output_lens": [0 if each.error else each.num_output_tokens for each in outcomes],
        "ttfts": [each.ttft_s for each in outcomes],
        "itls": [each.itls_s for each in outcomes],
        "latencies": [each.latency_s for each in outcomes],
        "start_times": [each.start_s for each in outcomes],
        "queue_times": [each.queue_s for each in outcomes],
        "generated_texts": [each.text for each in outcomes],
        "errors": [each.error for each in outcomes],
        "max_output_tokens_per_s": float(num_tokens.max()),
        "max_concurrent_requests": int(num_requests.max()),
    }
    values_s = latencies_s(outcomes)
    for metric in options.percentile_metrics:
        if metric == "client_queue_time" and options.max_concurrency is None:
            continue  # nothing waits in this process
        values_ms = [value * 1e3 for value in values_s[metric]]
        for name, value in distribution(values_ms, options.percentiles).items():
            result[f"{name}_{metric}_ms"] = value
    return result


def draft_result(before: DraftCounts, after: DraftCounts) -> dict[str, Any]:
    """Return the keys of drafts between two readings of an engine's counters; none without drafts.

    As in vLLM a draft is all that a request computed in a step, and rates are shares of drafts.
    """
    added = {name: count - before.get(name, 0) for name, count in after.items()}
    if (num_drafts := added.get("num_drafts", 0)) <= 0:
        return {}
    num_tokens, num_accepted = added.get("num_draft_tokens", 0), added.get("num_accepted_tokens", 0)
    positions = sorted(filter(str.isdigit, added), key=int)
    return {
        "spec_decode_acceptance_rate": 100 * num_accepted / max(num_tokens, 1),
        "spec_decode_acceptance_length": 1 + num_accepted / num_drafts,
        "spec_decode_num_drafts": num_drafts,
        "spec_decode_draft_tokens": num_tokens,
        "spec_decode_accepted_tokens": num_accepted,
        "spec_decode_per_position_acceptance_rates": [added[i] / num_drafts for i in positions],
    }


def table(result: Mapping[str, Any]) -> str:
    """Format a result as `vllm bench serve` prints it."""
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
        kinds = [kind for kind in own if kind != "std"]
        lines += [_line(f"{kind.capitalize()} {short} (ms):", result[own[kind]]) for kind in kinds]
    if "spec_decode_num_drafts" in result:
        lines.append(f"{'Speculative Decoding':-^{_WIDTH}}")
        lines += [_line(text, result[key]) for key, text in _DRAFT_LINES.items()]
        rates = result["spec_decode_per_position_acceptance_rates"]
        lines += ["Per-position acceptance (%):"] if rates else []
        lines += [_line(f"  Position {i}:", 100 * rate) for i, rate in enumerate(rates)]
    return "\n".join([*lines, "=" * _WIDTH])


def _line(text: str, value: float) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{text:<40} {shown:<10}".rstrip()


def result_path(options: LoadOptions, result: Mapping[str, Any]) -> Path:
    """Return the given file name, or one made of the configuration."""
    name = options.result_filename
    if name is None:
        rate = f"{options.traffic.rate}qps"
        if options.max_concurrency is not None:
            rate += f"-concurrency{options.max_concurrency}"
        model = str(result["model_id"]).rstrip("/").rpartition("/")[2]
        name = f"{options.label or result['backend']}-{rate}-{model}-{result['date']}.json"
    return Path(options.result_dir or "") / name


def write_result(options: LoadOptions, path: Path, result: Mapping[str, Any]) -> None:
    """Write one line, after existing ones with --append-result; raises ConfigError on failure."""
    is_kept = options.save_detailed
    line = json.dumps({k: v for k, v in result.items() if is_kept or k not in DETAILS})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if options.append_result and path.exists() and path.stat().st_size:
            line = f"\n{line}"
        with path.open("a" if options.append_result else "w", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: the result is not written") from None
