"""`nanocore metrics`: metrics in Prometheus' format, printed or served to scrapers."""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from collections.abc import Iterable
from typing import Final

from nanocore.cli.command import require
from nanocore.cli.interrupts import Interrupts
from nanocore.cli.reader import Read, observed, reader_parser
from nanocore.protocol.errors import AddressInUseError, ConfigError, NanocoreError
from nanocore.protocol.metrics import Metric, MetricSample
from nanocore.system.flags import DEFAULT_NAMESPACE, FlagParser, metrics_namespace, port
from nanocore.system.standard_streams import harmless

DEFAULT_HOST: Final = "127.0.0.1"
_PACKAGES: Final = ("prometheus_client",)
_READ_TIMEOUT_S: Final = 2.0


def run(arguments: list[str]) -> int:
    given = metrics_parser().parse_args(arguments)
    require(_PACKAGES, "metrics need", "pip install '.[server]'")
    work = _print(given) if given.metrics_port is None else _serve(given)
    return asyncio.run(Interrupts().run(work))


def metrics_parser() -> FlagParser:
    parser = reader_parser(
        "nanocore metrics",
        "Print metrics of an engine or a server in Prometheus' text format, or serve them.",
    )
    add = parser.add_argument
    add("--metrics-port", type=port, metavar="PORT",
        help="serve over HTTP at this port instead of printing; 0: any free port")  # fmt: skip
    add("--metrics-host", default=DEFAULT_HOST, metavar="HOST",
        help="address to serve them on (default: %(default)s)")  # fmt: skip
    add("--metrics-namespace", type=metrics_namespace, default=DEFAULT_NAMESPACE, metavar="NAME",
        help="prefix of metric names; vllm: vLLM's names (default: %(default)s)")  # fmt: skip
    add("--served-model-name", metavar="NAME",
        help="model_name label of the series (default: the engine's model)")  # fmt: skip
    return parser


async def _print(given: argparse.Namespace) -> None:
    from nanocore.http.exposition import exposition

    async with observed(given) as engine:
        name = given.served_model_name or engine.model()
        text = exposition(await engine.read(), name, given.metrics_namespace)
    sys.stdout.buffer.write(harmless(text.decode()).encode())


async def _serve(given: argparse.Namespace) -> None:
    """Serve until Ctrl-C. While the engine is gone, `engine_up` is 0."""
    from prometheus_client import CollectorRegistry, start_http_server

    from nanocore.http.exposition import PrometheusCollector

    loop = asyncio.get_running_loop()
    async with observed(given) as engine:
        name = given.served_model_name or engine.model()

        def read() -> Iterable[Metric]:
            # Runs in the thread of the HTTP server.
            return asyncio.run_coroutine_threadsafe(read_metrics(engine.read), loop).result()

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


async def read_metrics(read: Read) -> list[Metric]:
    """Return the engine's metrics, and `engine_up`."""
    try:
        async with asyncio.timeout(_READ_TIMEOUT_S):
            metrics = await read()
    except (NanocoreError, TimeoutError):
        metrics = []
    up = [MetricSample(float(bool(metrics)))]
    return [Metric("engine_up", "gauge", "1 if the engine answers, else 0.", up), *metrics]
