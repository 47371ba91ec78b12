"""HTML report of a run: its figures and plots in one page that needs no other file.

Plots are SVG made by matplotlib. The page loads nothing and runs no script.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final

import matplotlib
import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from nanocore.bench.load import Outcome
from nanocore.bench.result import METRIC_NAMES, distribution, latencies_s, per_second, succeeded

_MAX_CURVE_POINTS: Final = 500
_MAX_TIMELINE_REQUESTS: Final = 400
_WAITING, _PREFILL, _DECODE = "#c8c8c8", "#e8833a", "#3a76b0"
_STYLE: Final = """\
body{font:15px/1.45 system-ui,sans-serif;max-width:980px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse}td,th{padding:.15em 1em .15em 0;text-align:right}
td:first-child{text-align:left}tr{border-bottom:1px solid #ddd}
svg{max-width:100%;height:auto}pre{white-space:pre-wrap}"""


def html_report(
    result: Mapping[str, Any], outcomes: Sequence[Outcome], percentiles: Sequence[float]
) -> str:
    """Return the page. result: content of the run's JSON."""
    title = escape(f"{result['model_id']}, {result['backend']}, {result['date']}")
    values_ms = {
        METRIC_NAMES[metric][0]: [value * 1e3 for value in values] or [0.0]
        for metric, values in latencies_s(outcomes).items()
        if metric in ("ttft", "tpot", "itl", "e2el")
    }
    tables = {name: distribution(values, percentiles) for name, values in values_ms.items()}
    good = succeeded(outcomes)
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>",
        _table(
            [name, value]
            for name, value in result.items()
            if isinstance(value, (str, int, float)) and not name.endswith("_ms")
        ),
        "<h2>Latencies (ms)</h2>",
        _table([["", *tables["TTFT"]], *([name, *each.values()] for name, each in tables.items())]),
    ]
    if good:
        parts += [_svg(_distributions(values_ms)), "<h2>Over time</h2>", _svg(_over_time(good))]
        parts += ["<h2>Requests</h2>", _svg(_timeline(good))]
    if errors := sorted({each.error for each in outcomes if each.error}):
        parts += ["<h2>Errors</h2>", f"<pre>{escape(chr(10).join(errors[:20]))}</pre>"]
    return "\n".join([*parts, "</body></html>", ""])


def _table(rows: Iterable[Iterable[object]]) -> str:
    def cell(value: object) -> str:
        return escape(f"{value:,.2f}" if isinstance(value, float) else str(value))

    lines = ("".join(f"<td>{cell(value)}</td>" for value in row) for row in rows)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _distributions(values_ms: Mapping[str, Sequence[float]]) -> Figure:
    """Plot a histogram of each metric above its cumulative distribution."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    for (upper, lower), (name, values) in zip(
        figure.subplots(2, len(values_ms)).T, values_ms.items(), strict=True
    ):
        upper.hist(values, bins=40, color=_DECODE)
        upper.set(title=name, ylabel="number")
        shares = np.linspace(0, 100, min(len(values), _MAX_CURVE_POINTS) + 1)
        lower.plot(np.percentile(values, shares), shares / 100, color=_DECODE)
        lower.set(xlabel=f"{name} (ms)", ylabel="share", ylim=(0, 1.02))
    return figure


def _over_time(good: Sequence[Outcome]) -> Figure:
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    tokens, requests = figure.subplots(2, 1, sharex=True)
    num_tokens, num_requests = per_second(good)
    times = np.arange(len(num_tokens) + 1)
    tokens.stairs(num_tokens, times, fill=True, color=_DECODE)
    tokens.set(ylabel="tokens/s")
    requests.stairs(num_requests, times, fill=True, color=_PREFILL)
    requests.set(ylabel="requests", xlabel="seconds")
    return figure


def _timeline(good: Sequence[Outcome]) -> Figure:
    """Plot each request as a line: queued in the client, until its first token, until its end."""
    ordered = sorted(good, key=lambda each: each.arrival_s)
    shown = ordered[:: -(-len(ordered) // _MAX_TIMELINE_REQUESTS)]
    zero_s = shown[0].arrival_s
    figure = Figure(
        figsize=(10, 1.5 + 5 * len(shown) / _MAX_TIMELINE_REQUESTS), layout="constrained"
    )
    axes = figure.subplots()
    for color, name, ends in (
        (_WAITING, "client queue", [(each.arrival_s, each.start_s) for each in shown]),
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
    return figure


def _svg(figure: Figure) -> str:
    """Format as an element, without the XML head: its document type refers to another host."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "nanocore"}):
        # Without metadata there is no element whose namespaces are URLs of other hosts.
        none = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=none)
    svg = file.getvalue()
    return svg[svg.index("<svg") :]
