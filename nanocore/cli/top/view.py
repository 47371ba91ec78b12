"""How `nanocore top` looks: an engine's load as tables, bars and a line of the last minutes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nanocore.cli.top.readings import Load, Quantiles

_BARS: Final = "▁▂▃▄▅▆▇█"
_SPARKLINE_CHARS: Final = 60


def view(title: str, load: Load, history: Sequence[float]) -> RenderableType:
    """title: which engine. history: tokens generated per second, the last one is the load's."""
    state = " · drains" if load.is_draining else ""
    return Panel(
        Group(
            _requests(load),
            Text(),
            _tokens(load, history),
            Text(),
            _latencies(load),
            Text(),
            _ends(load),
        ),
        title=Text(f"nanocore top · {title}{state}"),
        title_align="left",
    )


def sparkline(values: Sequence[float], num_chars: int = _SPARKLINE_CHARS) -> str:
    """The last values as bars, the largest of them full; nothing is as low as can be."""
    shown = values[-num_chars:]
    most = max(shown, default=0.0) or 1.0
    return "".join([_BARS[round(value / most * (len(_BARS) - 1))] for value in shown])


def _requests(load: Load) -> Table:
    table = _grid(2)
    waiting = f"{load.num_waiting}"
    if load.num_deferred:
        waiting += f" ({load.num_deferred} for their structured output)"
    table.add_row("running", str(load.num_running))
    table.add_row("waiting", waiting)
    table.add_row("clients", str(load.num_clients))
    used = f"{load.kv_cache_usage:.1%} of {load.num_blocks:,} blocks"
    bar = Table.grid(padding=(0, 1))
    bar.add_row(ProgressBar(1.0, load.kv_cache_usage, width=20), used)
    table.add_row("KV cache", bar)
    table.add_row("prefix hits", _share(load.prefix_hit_rate))
    return table


def _tokens(load: Load, history: Sequence[float]) -> Table:
    table = _grid(2)
    table.add_row("prompt", f"{load.prompt_tokens_per_s:,.1f} tokens/s")
    table.add_row("generation", f"{load.generation_tokens_per_s:,.1f} tokens/s")
    table.add_row("", sparkline(history))
    table.add_row("steps", f"{load.steps_per_s:,.1f}/s")
    table.add_row(
        "machine",
        f"{_share(load.decode_mbu)} of its bandwidth in decodes (MBU), "
        f"{_share(load.prefill_mfu)} of its FLOP/s in prompts (MFU)",
    )
    return table


def _latencies(load: Load) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("ms", "mean", "p50", "p90", "p99"):
        table.add_column(head, justify="left" if head == "ms" else "right")
    for name, quantiles in (
        ("in the queue", load.queue_s),
        ("first token", load.ttft_s),
        ("between tokens", load.itl_s),
        ("whole requests", load.e2e_s),
    ):
        table.add_row(name, *_milliseconds(quantiles))
    return table


def _ends(load: Load) -> Table:
    table = _grid(2)
    ends = [f"{rate:,.1f} {reason}" for reason, rate in load.ended_per_s.items() if rate]
    table.add_row("ended/s", Text(", ".join(ends) or "none"))
    table.add_row("preempted/s", f"{load.preemptions_per_s:,.1f}")
    table.add_row("refused/s", f"{load.rejections_per_s:,.1f}")
    return table


def _grid(num_columns: int) -> Table:
    table = Table.grid(padding=(0, 2))
    for _ in range(num_columns):
        table.add_column()
    return table


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _milliseconds(quantiles: Quantiles) -> Iterable[str]:
    if quantiles.mean is None:
        return ["-"] * 4
    values = quantiles.mean, quantiles.p50, quantiles.p90, quantiles.p99
    least = f"<{quantiles.least * 1e3:g}"
    return [least if value is None else f"{value * 1e3:,.1f}" for value in values]
