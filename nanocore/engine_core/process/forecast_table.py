"""A forecast for people: the plain table that `--check` prints, and two lines for the log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from nanocore.engine_core.process.forecast import ContextForecast, Forecast


def table(forecast: Forecast) -> str:
    """Some lines of at most 80 characters."""
    contexts = map(_context, forecast.contexts)
    return "\n".join([*_memory(forecast), "", *_machine(forecast), "", _HEADINGS, *contexts])


def _memory(forecast: Forecast) -> Iterator[str]:
    ranks = forecast.ranks
    whose = f", of each of {len(ranks)} ranks at most" if len(ranks) > 1 else ""
    parameters = f"{forecast.num_params / 1e6:,.1f} M parameters"
    if forecast.active_params < forecast.num_params:
        parameters += f", {forecast.active_params / 1e6:,.1f} M at work for a token"
    blocks = f"{forecast.num_blocks:,} blocks of {forecast.block_size} tokens"

    def row(name: str, sizes: list[int], note: str) -> str:
        return f"  {name:<11}{max(sizes) / 1e6:>12,.1f} MB  {note}"

    yield f"memory{whose}"
    yield row("weights", [rank.weight_bytes for rank in ranks], parameters)
    kv = f"{forecast.kv_token_bytes:,.0f} bytes a token, {blocks}"
    yield row("KV cache", [rank.kv_cache_bytes for rank in ranks], kv)
    sizes = [rank.activation_bytes for rank in ranks]
    yield row("activations", sizes, "in the largest step, about")
    sizes = [rank.table_bytes for rank in ranks]
    yield row("tables", sizes, "token ids, block ids, rotations")
    yield row("left", [min(rank.left_bytes for rank in ranks)], "of what there is")


def _machine(forecast: Forecast) -> Iterator[str]:
    speed = forecast.speed
    yield f"machine, as measured now: {forecast.device}"
    yield f"  reads      {speed.bytes_per_s / 1e9:>12,.1f} GB/s from memory"
    if speed.near_bytes:
        near = f"from caches, {speed.near_bytes / 1e6:,.1f} MB at most"
        yield f"             {speed.near_bytes_per_s / 1e9:>10,.1f} GB/s {near}"
    yield f"  multiplies {speed.flops_per_s / 1e12:>12,.2f} TFLOP/s in {forecast.dtype}"


_HEADINGS: Final = """\
at best requests       decode, alone         decode, all             prefill
 tokens  at once        ms  tokens/s        ms  tokens/s        ms  tokens/s"""


def _context(one: ContextForecast) -> str:
    def speed(num_tokens: int, seconds: float) -> str:
        digits = 2 if seconds < 1 else 0
        return f" {seconds * 1e3:>9,.{digits}f} {num_tokens / seconds:>9,.0f}"

    return (
        f"{one.context_tokens:>7,}{one.num_requests:>9,}{speed(1, one.decode_s)}"
        f"{speed(one.num_requests, one.full_decode_s)}{speed(one.context_tokens, one.prefill_s)}"
    )


def summary(forecast: Forecast) -> Iterator[str]:
    """Two lines for a log; the longest requests are those that it speaks of."""
    parts = [
        f"{name} {max(getattr(rank, field) for rank in forecast.ranks) / 1e6:,.1f} MB"
        for name, field in _PARTS.items()
    ]
    whose = "on each rank, " if len(forecast.ranks) > 1 else ""
    kv = f"{forecast.kv_token_bytes:,.0f} bytes of KV a token"
    yield f"memory {whose}{', '.join(parts)}; {kv}"
    speed, longest = forecast.speed, forecast.contexts[-1]
    yield (
        f"at best {longest.decode_s * 1e3:,.2f} ms a token and {longest.prefill_s * 1e3:,.0f} ms a "
        f"prompt at {longest.context_tokens} tokens, alone: {speed.bytes_per_s / 1e9:,.1f} GB/s "
        f"and {speed.flops_per_s / 1e12:,.2f} TFLOP/s were measured"
    )


_PARTS: Final = {
    "weights": "weight_bytes",
    "KV cache": "kv_cache_bytes",
    "activations": "activation_bytes",
    "tables": "table_bytes",
}
