"""`nanocore metrics`: an engine's metrics in Prometheus' format, printed or served to scrapers."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Final

from nanocore.cli.command import require
from nanocore.cli.engine_reader import ReaderParser, join, report_errors
from nanocore.cli.flag_types import metrics_namespace, port
from nanocore.client import AsyncEngineClient

DEFAULT_NAMESPACE: Final = "nanocore"
_PACKAGES: Final = ("prometheus_client",)


def run(arguments: list[str]) -> int:
    """Print the metrics, or serve them until Ctrl-C; returns the exit code."""
    return report_errors("nanocore metrics", lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    parser = ReaderParser(
        "nanocore metrics", "Print an engine's metrics in Prometheus' text format."
    )
    parser.add_argument("--metrics-namespace", type=metrics_namespace, default=DEFAULT_NAMESPACE,
        metavar="NAME", help="names begin with it; vllm: as vLLM's (default: %(default)s)")  # fmt: skip
    parser.add_argument("--served-model-name", metavar="NAME",
        help="label of the series (default: the engine's name of its model)")  # fmt: skip
    given = parser.parse_args(arguments)
    require(_PACKAGES, "metrics need", "pip install '.[server]'")
    sys.stdout.buffer.write(asyncio.run(_read(given)))
    return 0


async def _read(given: argparse.Namespace) -> bytes:
    async with join(given) as client:
        return await read_exposition(client, given.served_model_name, given.metrics_namespace)


async def read_exposition(
    client: AsyncEngineClient, model_name: str | None, namespace: str
) -> bytes:
    """What a scraper gets. model_name: of the series; None: as the engine says."""
    from nanocore.http.exposition import exposition

    metrics = await client.metrics()
    return exposition(metrics, model_name or client.model_card.model, namespace)
