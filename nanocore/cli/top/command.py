"""`nanocore top`: a live view of any engine, read over the wire."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from nanocore.cli.command import require
from nanocore.cli.engine_reader import ReaderParser, join, report_errors, run_until_signal
from nanocore.cli.flag_types import seconds
from nanocore.cli.top.readings import Load, Reading, load_between
from nanocore.client import AsyncEngineClient
from nanocore.protocol.errors import NanocoreError
from nanocore.system.standard_streams import harmless

_HISTORY: Final = 600
_NOBODY: Final = "no engine answers; waiting for it"


def run(arguments: list[str]) -> int:
    """Show an engine's load until Ctrl-C; returns the exit code."""
    return report_errors("nanocore top", lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    given = _parse(arguments)
    if not given.json:
        require(["rich"], "the view needs", "pip install '.[top]', or use --json")
    is_live = sys.stdout.isatty() and not (given.json or given.once)
    return asyncio.run(run_until_signal(_watch(given) if is_live else _print_loads(given)))


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = ReaderParser("nanocore top", "Show what an engine does, as it does it.")
    parser.add_argument("--interval", type=seconds, default=1.0, metavar="S",
        help="seconds between two looks (default: %(default)g)")  # fmt: skip
    parser.add_argument("--once", action="store_true", help="print one view and end")
    parser.add_argument("--json", action="store_true",
        help="print an object of JSON for each look, or with --once for one")  # fmt: skip
    return parser.parse_args(arguments)


async def watch(
    client: AsyncEngineClient,
    interval_s: float,
    show: Callable[[Load | None], None],
    is_once: bool = False,
) -> None:
    """Read an engine again and again, and show what happened in between.

    show: is given None while no engine answers; it may come back.
    """
    before: Reading | None = None
    while True:
        try:
            now = Reading(await client.metrics(), time.monotonic())
        except NanocoreError:
            if is_once:
                raise
            before, now = None, None
            show(None)
        if before is not None and now is not None:
            if now.is_older_than(before):  # another engine has taken its place
                before = None
            else:
                show(load_between(before, now))
                if is_once:
                    return
        before = now
        await asyncio.sleep(interval_s)


async def _print_loads(given: argparse.Namespace) -> None:
    """One look below the other, for files, pipes and programs."""

    def show(load: Load | None) -> None:
        if given.json:
            told = {"error": _NOBODY} if load is None else load
            sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
        elif load is None:
            sys.stdout.write(f"{_NOBODY}\n")
        else:
            from rich.console import Console

            from nanocore.cli.top.view import view

            Console().print(view(_title(client), load, [load.generation_tokens_per_s]))
        sys.stdout.flush()

    async with join(given) as client:
        await watch(client, given.interval, show, is_once=given.once)


async def _watch(given: argparse.Namespace) -> None:
    from rich.live import Live
    from rich.text import Text

    from nanocore.cli.top.view import view

    history: deque[float] = deque(maxlen=_HISTORY)
    async with join(given) as client:
        with Live(Text("reading …"), auto_refresh=False, screen=True) as live:

            def show(load: Load | None) -> None:
                if load is None:
                    live.update(Text(_NOBODY), refresh=True)
                    return
                history.append(load.generation_tokens_per_s)
                live.update(view(_title(client), load, [*history]), refresh=True)

            await watch(client, given.interval, show)


def _title(client: AsyncEngineClient) -> str:
    card = client.model_card
    return (
        f"{harmless(card.model)} · {card.dtype} · requests of {card.max_model_len:,} tokens at most"
    )
