"""What compare.py writes: a workload's figures as JSON, and Markdown for a README.

Ratios are made within a repetition, where engines ran the same prompts minutes apart at most, and
then their median is taken; above 1 our engine is the faster one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, Final

from compare_engines import OURS
from compare_rounds import Turn
from report import spread, with_range
from workloads import Workload

HEADLINES: Final = {
    "W1": ("output_tokens_per_s", "output tok/s"),
    "W2": ("total_tokens_per_s", "total tok/s"),
    "W3": ("total_tokens_per_s", "total tok/s"),
    "W4": ("output_tokens_per_s", "output tok/s"),
    "W5": ("tpot_ms", "ms per token"),
}
"""The figure to read first; of all but W5's, more is better."""


def summarize(
    workload: Workload,
    turns: Mapping[str, Sequence[Turn]],
    discarded: Mapping[str, Sequence[Turn]],
) -> dict[str, Any]:
    """A workload's part of the report; turns by engine, one per repetition."""
    return {
        **workload.describe(),
        "engines": {
            name: {
                **_figures(workload, own),
                "times_slower_than_ours": spread(
                    [
                        theirs.run.wall_s / ours.run.wall_s
                        for theirs, ours in zip(own, turns[OURS], strict=True)
                    ]
                ),
                "first_tokens_like_ours": _agreement(own, turns[OURS]),
                "discarded": [
                    {"wall_s": round(turn.run.wall_s, 4), **asdict(turn.noise)}
                    for turn in discarded.get(name, ())
                ],
            }
            for name, own in turns.items()
        },
    }


def _figures(workload: Workload, turns: Sequence[Turn]) -> dict[str, Any]:
    num_out = workload.num_output_tokens
    num_tokens = workload.num_prompt_tokens + num_out
    walls_s = [turn.run.wall_s for turn in turns]
    columns = {
        "wall_s": walls_s,
        "output_tokens_per_s": [num_out / wall_s for wall_s in walls_s],
        "total_tokens_per_s": [num_tokens / wall_s for wall_s in walls_s],
        "ttft_ms": [median(turn.run.ttft_s) * 1e3 for turn in turns],
        "tpot_ms": [median(turn.run.tpot_s) * 1e3 for turn in turns],
        "foreign_cpu_share": [turn.noise.foreign_cpu_share for turn in turns],
        "canary_gb_per_s": [turn.noise.canary_gb_per_s for turn in turns],
    }
    figures: dict[str, Any] = {name: spread(values, 6) for name, values in columns.items()}
    return figures | {"noisy": [turn.noisy for turn in turns]}


def _agreement(turns: Sequence[Turn], ours: Sequence[Turn]) -> float | None:
    """Share of requests whose first token is ours, where both ran the same prompts.

    Below 1 where rounding turns a close choice; near 0 the engines ran different models.
    """
    pairs = [
        pair
        for own, other in zip(turns, ours, strict=True)
        if own.repetition == other.repetition
        for pair in zip(own.run.first_token_ids, other.run.first_token_ids, strict=True)
    ]
    return round(sum(a == b for a, b in pairs) / len(pairs), 4) if pairs else None


def markdown(report: Mapping[str, Any]) -> str:
    """Where it ran, the figures, and how they compare."""
    names = list(report["engines"])
    workloads = report["workloads"]
    lines = [_heading(report), "", _row(["workload", *names]), _rule(len(names) + 1)]
    for name, workload in workloads.items():
        metric, unit = HEADLINES[name]
        figures = [workload["engines"][engine][metric] for engine in names]
        cells = [with_range(figure, 0 if figure["median"] >= 100 else 1) for figure in figures]
        lines.append(_row([f"{name} ({unit})", *cells]))
    peers = [name for name in names if name != OURS]
    if peers:
        lines += ["", f"Time of each divided by that of {OURS}, median (range):", ""]
        lines += [_row(["workload", *peers]), _rule(len(peers) + 1)]
        for name, workload in workloads.items():
            ratios = [workload["engines"][peer]["times_slower_than_ours"] for peer in peers]
            lines.append(_row([name, *(with_range(ratio, 2) for ratio in ratios)]))
    noisy = [
        turn
        for row in workloads.values()
        for engine in row["engines"].values()
        for turn in engine["noisy"]
    ]
    if any(noisy):
        lines += ["", f"Noisy to the last retry: {sum(noisy)} of {len(noisy)} turns."]
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


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _rule(num_columns: int) -> str:
    return "|" + "---|" * num_columns
