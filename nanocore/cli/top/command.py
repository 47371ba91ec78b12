"""`nanocore top`: a live view of any engine or server."""

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
from nanocore.cli.interrupts import Interrupts
from nanocore.cli.reader import Read, observed, reader_parser
from nanocore.cli.top.load import Load, MetricsReading, load_between
from nanocore.protocol.errors import NanocoreError
from nanocore.system.flags import FlagParser, seconds

_HISTORY: Final = 600
_NO_ENGINE: Final = "no engine responds; waiting for one"


def run(arguments: list[str]) -> int:
    given = top_parser().parse_args(arguments)
    if not given.json:
        require(["rich"], "the view needs", "pip install '.[top]', or use --json")
    is_live = sys.stdout.isatty() and not (given.json or given.once)
    return asyncio.run(Interrupts().run(_watch(given) if is_live else _print_loads(given)))


def top_parser() -> FlagParser:
    parser = reader_parser("nanocore top", "Show the live load of an engine or a server.")
    parser.add_argument("--interval", type=seconds, default=1.0, metavar="S",
        help="seconds between samples (default: %(default)g)")  # fmt: skip
    parser.add_argument("--once", action="store_true", help="print one view and exit")
    parser.add_argument("--json", action="store_true",
        help="print one JSON object per sample")  # fmt: skip
    return parser


async def watch(
    read: Read,
    interval_s: float,
    show: Callable[[Load | None], None],
    is_once: bool = False,
) -> None:
    """Sample metrics, and show the load between two samples.

    show: gets None while no engine responds.
    """
    before: MetricsReading | None = None
    while True:
        try:
            now = MetricsReading(await read(), time.monotonic())
        except NanocoreError:
            if is_once:
                raise
            before, now = None, None
            show(None)
        if before is not None and now is not None:
            if now.is_older_than(before):  # a new engine
                before = None
            else:
                show(load_between(before, now))
                if is_once:
                    return
        before = now
        await asyncio.sleep(interval_s)


async def _print_loads(given: argparse.Namespace) -> None:

    def show(load: Load | None) -> None:
        if given.json:
            message = {"error": _NO_ENGINE} if load is None else load
            sys.stdout.write(msgspec.json.encode(message).decode() + "\n")
        elif load is None:
            sys.stdout.write(f"{_NO_ENGINE}\n")
        else:
            from rich.console import Console

            from nanocore.cli.top.view import view

            Console().print(view(engine.title(), load, [load.generation_tokens_per_s]))
        sys.stdout.flush()

    async with observed(given) as engine:
        await watch(engine.read, given.interval, show, is_once=given.once)


async def _watch(given: argparse.Namespace) -> None:
    from rich.live import Live
    from rich.text import Text

    from nanocore.cli.top.view import view

    history: deque[float] = deque(maxlen=_HISTORY)
    async with observed(given) as engine:
        with Live(Text("reading …"), auto_refresh=False, screen=True) as live:

            def show(load: Load | None) -> None:
                if load is None:
                    live.update(Text(_NO_ENGINE), refresh=True)
                    return
                history.append(load.generation_tokens_per_s)
                live.update(view(engine.title(), load, [*history]), refresh=True)

            await watch(engine.read, given.interval, show)
