"""The view of `nanocore top`: tables, bars and a sparkline of the last minutes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nanocore.cli.top.load import Load, Quantiles

_BARS: Final = "▁▂▃▄▅▆▇█"
_SPARKLINE_CHARS: Final = 60


def view(title: str, load: Load, history: Sequence[float]) -> RenderableType:
    """title: names the engine. history: generated tokens per second, the newest last."""
    state = " · draining" if load.is_draining else ""
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
    """Return the last values as bars, scaled to the largest."""
    shown = values[-num_chars:]
    most = max(shown, default=0.0) or 1.0
    return "".join([_BARS[round(value / most * (len(_BARS) - 1))] for value in shown])


def _requests(load: Load) -> Table:
    table = Table.grid(padding=(0, 2))
    waiting = f"{load.num_waiting}"
    if load.num_deferred:
        waiting += f" ({load.num_deferred} compiling structured outputs)"
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
    table = Table.grid(padding=(0, 2))
    table.add_row("prompt", f"{load.prompt_tokens_per_s:,.1f} tokens/s")
    table.add_row("generation", f"{load.generation_tokens_per_s:,.1f} tokens/s")
    table.add_row("", sparkline(history))
    table.add_row("steps", f"{load.steps_per_s:,.1f}/s")
    table.add_row(
        "machine",
        f"{_share(load.decode_mbu)} of memory bandwidth in decodes (MBU), "
        f"{_share(load.prefill_mfu)} of FLOP/s in prefills (MFU)",
    )
    return table


def _latencies(load: Load) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("ms", "mean", "p50", "p90", "p99"):
        table.add_column(head, justify="left" if head == "ms" else "right")
    for name, quantiles in (
        ("queue time", load.queue_s),
        ("time to first token", load.ttft_s),
        ("inter-token latency", load.itl_s),
        ("end to end", load.e2e_s),
    ):
        table.add_row(name, *_milliseconds(quantiles))
    return table


def _ends(load: Load) -> Table:
    table = Table.grid(padding=(0, 2))
    ends = [f"{rate:,.1f} {reason}" for reason, rate in load.ended_per_s.items() if rate]
    table.add_row("finished/s", Text(", ".join(ends) or "none"))
    table.add_row("preempted/s", f"{load.preemptions_per_s:,.1f}")
    table.add_row("rejected/s", f"{load.rejections_per_s:,.1f}")
    return table


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _milliseconds(quantiles: Quantiles) -> Iterable[str]:
    if quantiles.mean is None:
        return ["-"] * 4
    values = quantiles.mean, quantiles.p50, quantiles.p90, quantiles.p99
    least = f"<{quantiles.least * 1e3:g}"
    return [least if value is None else f"{value * 1e3:,.1f}" for value in values]
