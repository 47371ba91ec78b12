"""`nanocore ps`, `list`, `pull` and `cache`: what runs, what is on this machine, and downloads."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Final

import msgspec

from nanocore.cli.command import require
from nanocore.protocol.errors import ConfigError, ModelFileError, NanocoreError, counted
from nanocore.protocol.metrics import Stats
from nanocore.system.cache_folder import LIMIT_NAME, cache_entries, cache_root, limit_bytes
from nanocore.system.flags import FlagParser
from nanocore.system.running import Running, all_running
from nanocore.system.standard_streams import complain, harmless

_STATS_TIMEOUT_S: Final = 2.0
_EXIT_CODES: Final = "exit codes: 0 done, 2 usage or configuration, 130 interrupted"
_PULL_EXIT_CODES: Final = _EXIT_CODES.replace(", 130", ", 3 model files, 130")
_HUB: Final = (("huggingface_hub",), "the hub's cache needs", "pip install '.[engine]'")


def _lister(prog: str, description: str) -> FlagParser:
    parser = FlagParser(prog, description, epilog=_EXIT_CODES)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def ps_parser() -> FlagParser:
    return _lister("nanocore ps", "List the running engines and servers of this user.")


def list_parser() -> FlagParser:
    return _lister(
        "nanocore list",
        "List the models in the Hugging Face hub's cache that can be served, the last used first.",
    )


def pull_parser() -> FlagParser:
    parser = FlagParser(
        "nanocore pull",
        "Download a model from the Hugging Face hub, or bring it up to date, without serving it.",
        epilog=_PULL_EXIT_CODES,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="id org/name; of GGUF models also org/name:QUANTIZATION")
    add("--revision", metavar="NAME", help="branch, tag or commit (default: main)")
    return parser


def cache_parser() -> FlagParser:
    parser = FlagParser(
        "nanocore cache",
        "List what engines' starts keep in the user's cache folder, the last used first, or delete "
        f"it. It is made again when it is needed. {LIMIT_NAME} is its size limit in bytes "
        "(default: 2 GB), beyond which what was used longest ago is deleted.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("action", choices=("ls", "clear"), help="list, or delete everything")
    parser.add_argument("--json", action="store_true", help="with ls: print JSON")
    return parser


def run_ps(arguments: list[str]) -> int:
    given = ps_parser().parse_args(arguments)
    found = all_running()
    stats = asyncio.run(_all_stats(found))
    if not found:
        complain("nothing of yours runs: start a server with `nanocore serve MODEL`")
    if given.json:
        pairs = zip(found, stats, strict=True)
        _write_json([{**msgspec.to_builtins(one), "stats": load} for one, load in pairs])
    else:
        heads = "KIND", "PID", "MODEL", "REQUESTS", "UP", "ADDRESS"
        _write_table(heads, list(map(_ps_row, found, stats)))
    return 0


async def _all_stats(found: Sequence[Running]) -> list[Stats | None]:
    """Return the engines' stats; None of one that does not answer."""
    return await asyncio.gather(*map(_stats, found))


async def _stats(running: Running) -> Stats | None:
    from nanocore.client import AsyncEngineClient

    try:
        client = AsyncEngineClient.connect(
            running.endpoints, curve_dir=running.curve_dir, timeout_s=_STATS_TIMEOUT_S
        )
        async with asyncio.timeout(_STATS_TIMEOUT_S), client:
            return await client.stats()
    except (NanocoreError, TimeoutError):  # it hangs, or there is no key of a client for its TCP
        return None


def _ps_row(running: Running, stats: Stats | None) -> tuple[str, ...]:
    load = "no answer"
    if stats is not None:
        load = f"{stats.num_requests_running} running, {stats.num_requests_waiting} waiting"
    launched_by = "" if running.launched_by is None else f" of {running.launched_by}"
    up = timedelta(seconds=max(0, int(time.time() - running.started_s)))
    kind = f"{running.kind}{launched_by}"
    return kind, str(running.pid), running.model, load, str(up), running.address


def run_list(arguments: list[str]) -> int:
    given = list_parser().parse_args(arguments)
    require(*_HUB)
    from nanocore.worker.loading.hub import cached_models

    models = cached_models()
    if not models:
        from huggingface_hub.constants import HF_HUB_CACHE

        complain(f"no models in the hub's cache ({HF_HUB_CACHE}): nanocore pull ORG/NAME")
    if given.json:
        _write_json(models)
    else:
        rows = [
            (m.name, f"{m.num_bytes / 1e6:,.0f} MB", time.strftime("%F", time.localtime(m.used_s)))
            for m in models
        ]
        _write_table(("MODEL", "SIZE", "LAST USED"), rows)
    return 0


def run_cache(arguments: list[str]) -> int:
    given = cache_parser().parse_args(arguments)
    if given.json and given.action != "ls":
        raise ConfigError("--json is for `nanocore cache ls`")
    entries = cache_entries()[::-1]
    if given.action == "clear":
        left = [entry for entry in entries if not entry.delete()]
        num_bytes = sum(entry.num_bytes for entry in entries) - sum(one.num_bytes for one in left)
        print(f"deleted {counted(len(entries) - len(left), 'file')}, {num_bytes / 1e6:,.1f} MB")
        if left:
            raise ConfigError(f"{left[0].path} and {len(left) - 1} others cannot be deleted")
        return 0
    if given.json:
        _write_json([{"kind": one.kind, **one._asdict(), "path": str(one.path)} for one in entries])
        return 0
    if not entries:
        complain(f"nothing is cached in {cache_root()}")
    rows = [
        (
            one.kind,
            one.path.name[:12],
            f"{one.num_bytes / 1e6:,.1f} MB",
            time.strftime("%F %R", time.localtime(one.used_s)),
        )
        for one in entries
    ]
    num_bytes = sum(one.num_bytes for one in entries)
    _write_table(("KIND", "NAME", "SIZE", "LAST USED"), rows)
    sizes = f"{num_bytes / 1e6:,.1f} MB of at most {limit_bytes() / 1e6:,.0f} MB"
    print(f"{sizes}, in {harmless(str(cache_root()))}")
    return 0


def run_pull(arguments: list[str]) -> int:
    given = pull_parser().parse_args(arguments)
    require(*_HUB)
    if Path(given.model).expanduser().exists():
        raise ConfigError(f"{given.model} is on this machine already: nothing is to be downloaded")
    from nanocore.worker.loading.model_folder import resolve_model

    try:
        print(harmless(str(resolve_model(given.model, given.revision))))
    except ModelFileError as error:
        raise ModelFileError(str(error).removeprefix("--model ")) from None
    return 0


def _write_json(value: object) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def _write_table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    lines = [heads, *(tuple(map(harmless, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join(cells).rstrip())
