"""What compare.py writes: a workload's figures as JSON, and Markdown for a README.

Ratios are made within a repetition, where engines ran the same prompts minutes apart at most, and
then their median is taken; above 1 our engine is the faster one. A repetition in which memory was
read at another rate beside ours than beside theirs gives none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

from canary import are_comparable
from compare_engines import OURS
from peer_process import PeerRun
from report import spread, table, with_range
from workloads import Workload

Runs = dict[str, list[PeerRun]]
"""Of a workload, by engine; one per repetition."""
HEADLINES: Final = {
    "W1": ("output_tokens_per_s", "output tok/s"),
    "W2": ("total_tokens_per_s", "total tok/s"),
    "W3": ("total_tokens_per_s", "total tok/s"),
    "W4": ("output_tokens_per_s", "output tok/s"),
    "W5": ("tpot_ms", "ms per token"),
}
"""The figure to read first; of all but W5's, more is better."""


def summarize(workload: Workload, runs: Runs) -> dict[str, Any]:
    """A workload's part of the report."""
    ours = runs[OURS]
    engines = {}
    for name, own in runs.items():
        pairs = [
            pair
            for pair in zip(own, ours, strict=True)
            if are_comparable(pair[0].read_gb_per_s, pair[1].read_gb_per_s)
        ]
        ratios = [theirs.wall_s / our.wall_s for theirs, our in pairs]
        engines[name] = {
            **_figures(workload, own),
            "times_slower_than_ours": spread(ratios) if ratios else None,
            "pairs_dropped": len(own) - len(pairs),
        }
        if not workload.sampling:
            engines[name]["first_tokens_like_ours"] = _agreement(own, ours)
    return {**workload.describe(), "engines": engines}


def _figures(workload: Workload, runs: Sequence[PeerRun]) -> dict[str, Any]:
    num_out = workload.num_output_tokens
    num_tokens = workload.num_prompt_tokens + num_out
    columns = {
        "wall_s": [run.wall_s for run in runs],
        "output_tokens_per_s": [num_out / run.wall_s for run in runs],
        "total_tokens_per_s": [num_tokens / run.wall_s for run in runs],
        "ttft_ms": [median(run.ttft_s) * 1e3 for run in runs],
        "tpot_ms": [median(run.tpot_s) * 1e3 for run in runs],
        "read_gb_per_s": [run.read_gb_per_s for run in runs],
    }
    return {name: spread(values, 6) for name, values in columns.items()}


def _agreement(runs: Sequence[PeerRun], ours: Sequence[PeerRun]) -> float:
    """Share of requests whose first token is ours.

    Below 1 where rounding turns a close choice; near 0 the engines ran different models.
    """
    pairs = [
        pair
        for own, other in zip(runs, ours, strict=True)
        for pair in zip(own.first_token_ids, other.first_token_ids, strict=True)
    ]
    return round(sum(a == b for a, b in pairs) / len(pairs), 4)


def markdown(report: Mapping[str, Any]) -> str:
    """Where it ran, the figures, and how they compare."""
    names = list(report["engines"])
    peers = [name for name in names if name != OURS]
    figures, ratios = [["workload", *names]], [["workload", *peers]]
    for name, workload in report["workloads"].items():
        metric, unit = HEADLINES[name.partition("+")[0]]
        engines = workload["engines"]
        rates = [engines[engine][metric] for engine in names]
        cells = [with_range(rate, 0 if rate["median"] >= 100 else 1) for rate in rates]
        figures.append([f"{name} ({unit})", *cells])
        slower = [engines[peer]["times_slower_than_ours"] for peer in peers]
        ratios.append([name, *(with_range(ratio, 2) if ratio else "noisy" for ratio in slower)])
    lines = [_heading(report), "", table(figures)]
    if peers:
        lines += ["", f"Time of each divided by that of {OURS}, median (range):", "", table(ratios)]
    return "\n".join(lines)


def _heading(report: Mapping[str, Any]) -> str:
    versions = "; ".join(
        f"{name}: {', '.join(f'{part} {text}' for part, text in engine['versions'].items())}"
        for name, engine in report["engines"].items()
    )
    commit = (report["commit"] or "unknown")[:12] + (" and changes" if report["dirty"] else "")
    return (
        f"`{report['model']}` on {report['threads']} cores of {report['host']['cpu']}, "
        f"{report['date'][:10]}, commit {commit}. {versions}. Median (range)."
    )
