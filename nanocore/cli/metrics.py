"""`nanocore metrics`: an engine's metrics in Prometheus' format, printed or served to scrapers."""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from collections.abc import Iterable
from typing import Final

from nanocore.cli.command import require
from nanocore.cli.engine_reader import ReaderParser, join, report_errors, run_until_signal
from nanocore.cli.flag_types import DEFAULT_NAMESPACE, metrics_namespace, port
from nanocore.client import AsyncEngineClient
from nanocore.protocol.errors import AddressInUseError, ConfigError, NanocoreError
from nanocore.protocol.metrics import Metric, MetricSample
from nanocore.system.standard_streams import harmless

DEFAULT_HOST: Final = "127.0.0.1"
_PACKAGES: Final = ("prometheus_client",)
_PATIENCE_S: Final = 2.0


def run(arguments: list[str]) -> int:
    """Print the metrics, or serve them until Ctrl-C; returns the exit code."""
    return report_errors("nanocore metrics", lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    given = _parse(arguments)
    require(_PACKAGES, "metrics need", "pip install '.[server]'")
    work = _print(given) if given.metrics_port is None else _serve(given)
    return asyncio.run(run_until_signal(work))


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = ReaderParser(
        "nanocore metrics", "Print an engine's metrics in Prometheus' text format, or serve them."
    )
    add = parser.add_argument
    add("--metrics-port", type=port, metavar="PORT",
        help="serve them over HTTP there, 0 for any, instead of printing them")  # fmt: skip
    add("--metrics-host", default=DEFAULT_HOST, metavar="HOST",
        help="address to serve them at (default: %(default)s)")  # fmt: skip
    add("--metrics-namespace", type=metrics_namespace, default=DEFAULT_NAMESPACE, metavar="NAME",
        help="names begin with it; vllm: as vLLM's (default: %(default)s)")  # fmt: skip
    add("--served-model-name", metavar="NAME",
        help="label of the series (default: the engine's name of its model)")  # fmt: skip
    return parser.parse_args(arguments)


async def _print(given: argparse.Namespace) -> None:
    from nanocore.http.exposition import exposition

    async with join(given) as client:
        name = given.served_model_name or client.model_card.model
        text = exposition(await client.metrics(), name, given.metrics_namespace)
    sys.stdout.buffer.write(harmless(text.decode()).encode())


async def _serve(given: argparse.Namespace) -> None:
    """Until Ctrl-C. An engine that is gone is one whose `engine_up` is 0; it may come back."""
    from prometheus_client import CollectorRegistry, start_http_server

    from nanocore.http.exposition import PrometheusCollector

    loop = asyncio.get_running_loop()
    async with join(given) as client:
        name = given.served_model_name or client.model_card.model

        def read() -> Iterable[Metric]:
            """Called by the thread that serves."""
            return asyncio.run_coroutine_threadsafe(read_metrics(client), loop).result()

        registry = CollectorRegistry()
        registry.register(PrometheusCollector(read, name, given.metrics_namespace))
        try:
            server, thread = start_http_server(given.metrics_port, given.metrics_host, registry)
        except socket.gaierror as error:
            raise ConfigError(f"--metrics-host {given.metrics_host}: {error.strerror}") from None
        except OSError as error:
            raise AddressInUseError(
                f"--metrics-port {given.metrics_port}: {error.strerror}; choose another, or 0"
            ) from None
        host = f"[{given.metrics_host}]" if ":" in given.metrics_host else given.metrics_host
        print(f"metrics: http://{host}:{server.server_port}/metrics", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            server.shutdown()
            server.server_close()
            await asyncio.to_thread(thread.join)


async def read_metrics(client: AsyncEngineClient) -> list[Metric]:
    """The engine's metrics, and whether it has told them."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            metrics = await client.metrics()
    except (NanocoreError, TimeoutError):
        metrics = []
    up = [MetricSample(float(bool(metrics)))]
    return [Metric("engine_up", "gauge", "1 if the engine answers, else 0.", up), *metrics]
