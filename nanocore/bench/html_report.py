"""A page about a run: its figures and plots in one file, which needs no other.

Plots are SVG within the page, by matplotlib; nothing is loaded from anywhere, and nothing runs.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from nanocore.bench.outcome import Outcome
from nanocore.bench.statistics import Samples, Seconds, percentile_name, succeeded

MAX_CURVE_POINTS: Final = 500
MAX_TIMELINE_REQUESTS: Final = 400
_WAITING, _PREFILL, _DECODE = "#c8c8c8", "#e8833a", "#3a76b0"
_STYLE: Final = """\
body{font:15px/1.45 system-ui,sans-serif;max-width:980px;margin:2em auto;padding:0 1em;color:#222}
h1{font-size:1.4em}h2{font-size:1.1em;margin-top:1.6em}
table{border-collapse:collapse}td,th{padding:.15em 1em .15em 0;text-align:right}
td:first-child,th:first-child{text-align:left}tr{border-bottom:1px solid #ddd}
svg{max-width:100%;height:auto}pre{white-space:pre-wrap}"""


def html_report(result: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    """The page. result: what the JSON of the run holds."""
    title = f"{result['model_id']}, {result['backend']}, {result['date']}"
    samples = Samples.of(outcomes)
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        _figures(result),
        "<h2>Latencies</h2>",
        _latencies(samples, result["percentiles"]),
    ]
    if samples.e2el:
        parts += [
            _svg(_distributions(samples)),
            "<h2>Over time</h2>",
            _svg(_over_time(Seconds.of(outcomes))),
            "<h2>Requests</h2>",
            _svg(_timeline(succeeded(outcomes))),
        ]
    if errors := sorted({each.error for each in outcomes if each.error}):
        parts += ["<h2>Errors</h2>", f"<pre>{escape(chr(10).join(errors[:20]))}</pre>"]
    return "\n".join([*parts, "</body></html>", ""])


def _figures(result: Mapping[str, Any]) -> str:
    rows = [
        f"<tr><td>{escape(name)}</td><td>{escape(_shown(value))}</td></tr>"
        for name, value in result.items()
        if isinstance(value, (str, int, float)) and not name.endswith("_ms")
    ]
    return f"<table>{''.join(rows)}</table>"


def _shown(value: str | float) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


def _latencies(samples: Samples, percentiles: Sequence[float]) -> str:
    heads = ["ms", "mean", "median", *map(percentile_name, percentiles)]
    lines = [f"<tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>"]
    for name, values in (
        ("TTFT", samples.ttft),
        ("TPOT", samples.tpot),
        ("ITL", samples.itl),
        ("E2EL", samples.e2el),
    ):
        column = np.asarray(values or [0.0]) * 1e3
        numbers = [np.mean(column), np.median(column), *np.percentile(column, list(percentiles))]
        cells = "".join(f"<td>{number:,.2f}</td>" for number in numbers)
        lines.append(f"<tr><td>{name}</td>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _distributions(samples: Samples) -> Figure:
    """Above how the values are spread, below which share of them is at most so long."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    grid = figure.subplots(2, 3)
    for (upper, lower), (name, values) in zip(
        grid.T,
        (("TTFT", samples.ttft), ("ITL", samples.itl), ("E2E", samples.e2el)),
        strict=True,
    ):
        column = np.asarray(values or [0.0]) * 1e3
        upper.hist(column, bins=40, color=_DECODE)
        upper.set(title=name, ylabel="number")
        shares = np.linspace(0, 100, min(len(column), MAX_CURVE_POINTS) + 1)
        lower.plot(np.percentile(column, shares), shares / 100, color=_DECODE)
        lower.set(xlabel=f"{name} (ms)", ylabel="share", ylim=(0, 1.02))
        _bare(upper, lower)
    return figure


def _over_time(seconds: Seconds) -> Figure:
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    times = np.arange(len(seconds.num_tokens) + 1)
    upper.stairs(seconds.num_tokens, times, fill=True, color=_DECODE)
    upper.set(ylabel="tokens/s")
    lower.stairs(seconds.num_requests, times, fill=True, color=_PREFILL)
    lower.set(ylabel="requests", xlabel="seconds")
    _bare(upper, lower)
    return figure


def _timeline(outcomes: Sequence[Outcome]) -> Figure:
    """Each request a line: waiting on our side, to its first token, to its end."""
    ordered = sorted(outcomes, key=lambda each: each.arrival_s)
    every = -(-len(ordered) // MAX_TIMELINE_REQUESTS)
    shown = ordered[::every]
    zero_s = shown[0].arrival_s
    figure = Figure(
        figsize=(10, 1.5 + 5 * len(shown) / MAX_TIMELINE_REQUESTS), layout="constrained"
    )
    axes = figure.subplots()
    for color, name, ends in (
        (_WAITING, "waiting for its turn", [(each.arrival_s, each.start_s) for each in shown]),
        (_PREFILL, "to the first token", [(e.start_s, e.chunk_times_s[0]) for e in shown]),
        (_DECODE, "to the end", [(each.chunk_times_s[0], each.end_s) for each in shown]),
    ):
        lines = [
            [(start_s - zero_s, row), (end_s - zero_s, row)]
            for row, (start_s, end_s) in enumerate(ends)
        ]
        axes.add_collection(LineCollection(lines, colors=color, label=name, linewidths=1.5))
    axes.autoscale()
    axes.invert_yaxis()
    axes.set(xlabel="seconds", ylabel=f"{len(shown)} of {len(ordered)} requests")
    axes.legend(loc="lower left", fontsize="small")
    _bare(axes)
    return figure


def _bare(*all_axes: Axes) -> None:
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)


def _svg(figure: Figure) -> str:
    """Without the head of a file of its own, which names a document type elsewhere."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "nanocore"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
