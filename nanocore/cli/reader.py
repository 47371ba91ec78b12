"""Readers: commands that only observe, an engine over its wire or a server by its metrics."""

from __future__ import annotations

import argparse
import asyncio
import os
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from typing import Final, TypeAlias

from nanocore.cli.engine_choice import JOIN_TIMEOUT_S
from nanocore.client import AsyncEngineClient
from nanocore.protocol.endpoint import default_endpoint, ipc_address
from nanocore.protocol.errors import ConfigError, EngineDeadError
from nanocore.protocol.metrics import Metric
from nanocore.system.flags import FlagParser, seconds, server_url
from nanocore.system.running import NOTHING_RUNS, find_one
from nanocore.system.standard_streams import harmless

_MAX_BYTES: Final = 2**24
_EXIT_CODES: Final = """\
exit codes: 0 done, 2 usage or configuration, 5 address in use, 70 no engine responds, or internal
error, 130 interrupted"""


def reader_parser(prog: str, description: str) -> FlagParser:
    parser = FlagParser(prog, description, epilog=_EXIT_CODES)
    add = parser.add_argument
    add("--endpoint", metavar="ENDPOINT",
        help="an engine's, ipc:// or tcp:// (default: the one of this user that is running)",
    )  # fmt: skip
    add("--url", type=server_url, help="URL of a server, e.g. http://127.0.0.1:8000, instead")
    add("--curve-dir", metavar="DIR", help="keys of nanocore-keygen, for tcp://")
    add("--timeout", type=seconds, default=JOIN_TIMEOUT_S, metavar="S",
        help="seconds to connect (default: %(default)g)")  # fmt: skip
    return parser


Read: TypeAlias = Callable[[], Awaitable[list[Metric]]]
"""Returns metrics of an engine or a server. Raises NanocoreError: it does not answer."""


@dataclass(frozen=True, slots=True)
class Observed:
    """An engine or a server. model: its name. title: names it for people."""

    read: Read
    model: Callable[[], str]
    title: Callable[[], str]


@asynccontextmanager
async def observed(given: argparse.Namespace) -> AsyncIterator[Observed]:
    """Connect to what a `reader_parser`'s flags name, or to the one engine that runs.

    Raises:
        ConfigError: several run, or flags contradict each other.
        NanocoreError: none runs, or it does not answer.
    """
    if given.url is not None:
        if given.endpoint is not None or given.curve_dir is not None:
            raise ConfigError("--url names a server: leave --endpoint and --curve-dir out")
        server = _Server(given.url, given.timeout)
        await server.metrics()
        yield Observed(
            server.metrics, lambda: server.model, lambda: harmless(f"{server.model} · {given.url}")
        )
        return
    async with _joined(given) as client:

        def title() -> str:
            card = client.model_card
            return f"{harmless(card.model)} · {card.dtype} · context {card.max_model_len:,} tokens"

        yield Observed(client.metrics, lambda: client.model_card.model, title)


def _joined(given: argparse.Namespace) -> AsyncEngineClient:
    connect = partial(AsyncEngineClient.connect, timeout_s=given.timeout)
    if given.endpoint is not None or given.curve_dir is not None:
        return connect(given.endpoint, curve_dir=given.curve_dir)
    found = find_one(with_private=True)
    if found is not None:
        return connect(found.endpoints, curve_dir=found.curve_dir)
    if not os.path.lexists(ipc_address(default_endpoint()).path):  # one that loads is waited for
        raise EngineDeadError(f"{NOTHING_RUNS} with --endpoint or --url")
    return connect(None)


class _Server:
    """A server with our metrics, or vLLM's. model: known after the first reading."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.model = ""
        self._url = f"{url}/metrics"
        self._timeout_s = timeout_s
        # A proxy would not reach the addresses of this machine.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    async def metrics(self) -> list[Metric]:
        from nanocore.http.exposition import read_exposition

        text = await asyncio.to_thread(self._read)
        try:
            metrics, self.model = read_exposition(text)
        except ValueError:
            metrics = []
        if not metrics:
            raise EngineDeadError(f"{self._url} has no metrics of an engine")
        return metrics

    def _read(self) -> str:
        try:
            with self._opener.open(self._url, timeout=self._timeout_s) as response:
                return str(response.read(_MAX_BYTES).decode())
        except urllib.error.HTTPError as error:
            error.close()
            raise EngineDeadError(f"{self._url}: HTTP {error.code}") from None
        except (OSError, ValueError, HTTPException) as error:
            raise EngineDeadError(f"{self._url}: {getattr(error, 'reason', error)}") from None
